"""What the `quantization_config` of an HF checkpoint says: which weights are in 8-bit floats, and how they are scaled.

A weight `name` is stored as e4m3 values beside its scales: `<name>_scale_inv`, one a block, or `<name>_scale`, one for
the whole tensor; value times scale is the weight. It reads the plain dict of config.json and imports no torch, so that
a command line is checked and planned with it; the arithmetic is slime.utils.fp8's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from slime.utils.errors import UsageError

BLOCK_SUFFIX, TENSOR_SUFFIX = "_scale_inv", "_scale"
SCALE_BYTES = 4
DEFAULT_BLOCK = (128, 128)
REMEDY = "use the unquantized checkpoint, or make one in fp8 of it with tools/convert_hf_to_fp8.py"

# The linear layers that SGLang quantises. Embeddings, norms, routers (`mlp.gate`), the output layer and the projection
# of a multi-token prediction layer (`eh_proj`) it keeps as they are.
_LINEAR = re.compile(r".*\.layers\.\d+\..*((?<!\.eh)_proj(_with_mqa)?|\.experts\.\d+\.w[123])\.weight")


@dataclass(frozen=True)
class Fp8Format:
    """How the weights of an fp8 checkpoint are stored.

    Attributes:
        block_size: rows and columns that share a scale; None: one scale a tensor.
        is_ue8m0: scales are powers of two.
        unquantized: module paths that keep their weights, as SGLang and transformers read them: "lm_head",
            "model.layers.0.mlp.gate", or a part of a path ("mlp.gate").
    """

    block_size: tuple[int, int] | None = DEFAULT_BLOCK
    is_ue8m0: bool = False
    unquantized: tuple[str, ...] = ()

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Fp8Format | None:
        """The format that a config.json declares; None where it has no quantization_config.

        Raises:
            UsageError: a quantisation that weights cannot be synced in, and why.
        """
        config = hf_config.get("quantization_config")
        if not config:
            return None
        if problem := _problem(config):
            raise UsageError(problem)
        size = config.get("weight_block_size")
        ignored = config.get("ignored_layers") or config.get("modules_to_not_convert") or ()
        return cls(
            block_size=(size[0], size[1]) if size else None,
            is_ue8m0=config.get("scale_fmt") == "ue8m0",
            unquantized=tuple(name.removeprefix("model.").rstrip(".") for name in ignored),
        )

    @property
    def kind(self) -> str:
        """What it is called in words."""
        return "fp8"

    @property
    def scale_suffix(self) -> str:
        """What follows a weight's name in the name of its scales."""
        return BLOCK_SUFFIX if self.block_size else TENSOR_SUFFIX

    def quantizes(self, name: str) -> bool:
        """Whether the HF tensor of that name is stored in 8 bit."""
        if not _LINEAR.fullmatch(name):
            return False
        path = "." + name.removesuffix(".weight") + "."
        return not any(f".{ignored}." in path for ignored in self.unquantized)

    def num_scales(self, rows: int, columns: int) -> int:
        """Scales of a matrix; blocks at its edges may be smaller."""
        if self.block_size is None:
            return 1
        return -(-rows // self.block_size[0]) * -(-columns // self.block_size[1])

    def stored_bytes(self, name: str, shape: tuple[int, ...], *, itemsize: int) -> int:
        """Bytes of a tensor with its scales; `itemsize` is that of one which stays as it is."""
        if not self.quantizes(name):
            return prod(shape) * itemsize
        return prod(shape) + self.num_scales(shape[0], shape[1]) * SCALE_BYTES

    def bytes_of_params(self, num_params: int, *, itemsize: int) -> int:
        """Bytes of so many quantised parameters, blocks at edges not counted; scales are fp32 whatever `itemsize`."""
        per_scale = prod(self.block_size) if self.block_size else max(1, num_params)
        return num_params + num_params // per_scale * SCALE_BYTES

    def config(self) -> dict[str, Any]:
        """The quantization_config of a checkpoint in this format, as SGLang and transformers read it."""
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if self.block_size:
            config["weight_block_size"] = list(self.block_size)
        if self.is_ue8m0:
            config["scale_fmt"] = "ue8m0"
        if self.unquantized:
            config["modules_to_not_convert"] = list(self.unquantized)
        return config


def _problem(config: Any) -> str | None:
    """Why weights cannot be synced in this quantisation; None where they can."""
    what = "quantization_config of the HF config"
    if not isinstance(config, Mapping):
        return f"{what} is no mapping: {config!r}; is it the config.json of the model?"
    method, size = str(config.get("quant_method")).lower(), config.get("weight_block_size")
    if method != "fp8":
        return (
            f"{what}: quant_method {method!r} is not supported, for its weights cannot be made from the trainer's at "
            f"every sync ({_reason(method)}); {REMEDY}."
        )
    if config.get("activation_scheme", "dynamic") != "dynamic":
        return (
            f"{what}: activation_scheme {config['activation_scheme']!r} is not supported, for its scales belong to "
            f"the checkpoint's weights, and training changes those; {REMEDY} (activation_scheme 'dynamic')."
        )
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"{what}: fmt {config['fmt']!r} is not supported, SGLang serves e4m3; {REMEDY}."
    if config.get("scale_fmt") not in (None, "float", "float32", "ue8m0"):
        return f"{what}: scale_fmt {config['scale_fmt']!r} is neither ue8m0 nor left out; {REMEDY}."
    if size is not None and not _is_block(size):
        return f"{what}: weight_block_size {size!r} is not two whole numbers above 0, as [128, 128]; {REMEDY}."
    return None


def _is_block(size: Any) -> bool:
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    return is_pair and all(isinstance(number, int) and number > 0 for number in size)


def _reason(method: str) -> str:
    if method in ("awq", "gptq", "gptq_marlin", "auto-round"):
        return "4-bit weights that a calibration on data has chosen"
    if method == "mxfp8":
        return "blocks of 1 x 32 are made for Blackwell GPUs"
    return "built are 'fp8' and, of 'compressed-tensors', integers of 4 bits"
