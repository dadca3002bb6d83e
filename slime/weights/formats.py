"""How an HF checkpoint stores weights, by its `quantization_config`: as they are, in fp8 or in int4.

A weight `name` in 8-bit floats is stored as e4m3 values next to its scales: `<name>_scale_inv`, one a block, or
`<name>_scale`, one for the whole tensor; value times scale is the weight. A weight `<module>.weight` [N, K] in 4-bit
integers (compressed-tensors, "pack-quantized") is stored as `<module>.weight_packed` int32 [N, K / 8],
`<module>.weight_scale` [N, K / group], `<module>.weight_shape` (N and K) and, where it is asymmetric,
`<module>.weight_zero_point`.

The plain dict of config.json is read without torch, so that a command line is checked and planned with it; the
arithmetic is in slime.weights.quantization and slime.weights.quantization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError

BLOCK_SUFFIX, TENSOR_SUFFIX = "_scale_inv", "_scale"
SCALE_BYTES = 4
DEFAULT_BLOCK = (128, 128)
FP8_REMEDY = "use the unquantized checkpoint, or make one in fp8 of it with tools/convert_hf_to_fp8.py"
# The linear layers that SGLang quantises. Embeddings, norms, routers (`mlp.gate`), the output layer and the projection
# of a multi-token prediction layer (`eh_proj`) it keeps as they are.
_LINEAR = re.compile(
    r".*\.layers\.\d+\..*((?<!\.eh)(?<!\.indexer\.weights)_proj(_with_mqa)?|\.indexer\.w(q_b|k)|\.experts\.\d+\.w[123])"
    r"\.weight"
)

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
COLUMN_GROUPS = "weight_g_idx"
"""Which group each column is of, where they are not in order (actorder "group")."""
SHAPE_BYTES = 16
EXPERTS_ONLY = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts?\..*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
"""What Kimi-K2-Thinking leaves alone: everything but experts."""
METHODS = ("compressed-tensors", "compressed_tensors")
INT4_REMEDY = "make the checkpoint with tools/convert_hf_to_int4_direct.py, or use the unquantized one"


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
    activations, fmt = config.get("activation_scheme", "dynamic"), config.get("fmt", "e4m3")
    rows = (
        (
            method != "fp8",
            f"{what}: quant_method {method!r} is not supported, for its weights cannot be made from the trainer's at "
            f"every sync ({_reason(method)}); {FP8_REMEDY}.",
        ),
        (
            activations != "dynamic",
            f"{what}: activation_scheme {activations!r} is not supported, for its scales belong to the checkpoint's "
            f"weights, and training changes those; {FP8_REMEDY} (activation_scheme 'dynamic').",
        ),
        (
            fmt not in ("e4m3", "float8_e4m3fn"),
            f"{what}: fmt {fmt!r} is not supported, SGLang serves e4m3; {FP8_REMEDY}.",
        ),
        (
            config.get("scale_fmt") not in (None, "float", "float32", "ue8m0"),
            f"{what}: scale_fmt {config.get('scale_fmt')!r} is neither ue8m0 nor left out; {FP8_REMEDY}.",
        ),
        (
            size is not None and not _is_block(size),
            f"{what}: weight_block_size {size!r} is not two whole numbers above 0, as [128, 128]; {FP8_REMEDY}.",
        ),
    )
    return next((sentence for is_wrong, sentence in rows if is_wrong), None)


def _is_block(size: Any) -> bool:
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    return is_pair and all(isinstance(number, int) and number > 0 for number in size)


def _reason(method: str) -> str:
    if method in ("awq", "gptq", "gptq_marlin", "auto-round"):
        return "4-bit weights that a calibration on data has chosen"
    if method == "mxfp8":
        return "blocks of 1 x 32 are made for Blackwell GPUs"
    return "built are 'fp8' and, of 'compressed-tensors', integers of 4 bits"


@dataclass(frozen=True)
class Int4Format:
    """How the weights of an int4 checkpoint are stored.

    Attributes:
        group_size: columns that share a scale.
        is_symmetric: there are no zero points.
        ignored: modules that keep their weights: a path or the end of one, or "re:" and a regular expression that
            matches the beginning of a path; as SGLang reads them.
    """

    group_size: int = 32
    is_symmetric: bool = True
    ignored: tuple[str, ...] = ("lm_head",)

    def quantizes(self, name: str) -> bool:
        """Whether the HF tensor of that name (ending in ".weight") is stored in 4 bit."""
        if not _LINEAR.fullmatch(name):
            return False
        module = name.removesuffix(".weight")
        return not any(
            re.match(rule[3:], module) if rule.startswith("re:") else f".{module}".endswith(f".{rule}")
            for rule in self.ignored
        )

    @property
    def kind(self) -> str:
        """What it is called in words."""
        return "int4"

    def stored_bytes(self, name: str, shape: tuple[int, ...], *, itemsize: int) -> int:
        """Bytes of a tensor with its scales and shape; `itemsize` is that of one which stays as it is."""
        if not self.quantizes(name):
            return prod(shape) * itemsize
        rows, columns = shape
        groups = columns // self.group_size
        zeros = 0 if self.is_symmetric else rows // 8 * groups * 4
        return rows * -(-columns // 8) * 4 + rows * groups * itemsize + zeros + SHAPE_BYTES

    def bytes_of_params(self, num_params: int, *, itemsize: int) -> int:
        """Bytes of so many quantised parameters; `itemsize` is that of a scale. Shapes are not counted."""
        return num_params // 2 + num_params // self.group_size * itemsize

    def config(self) -> dict[str, Any]:
        """The quantization_config of a checkpoint in this format, as SGLang and transformers read it."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "group",
            "group_size": self.group_size,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(self.ignored),
            "kv_cache_scheme": None,
        }

    def check_stored(
        self, module: str, packed: Sequence[int], scales: Sequence[int], zeros: Sequence[int] | None, *, where: str
    ) -> None:
        """Compare the shapes in which a weight is stored.

        Args:
            module: what its tensors' names begin with, with the dot behind it.
            packed, scales, zeros: their shapes; None: there are no zero points.
            where: the checkpoint, for the error.

        Raises:
            UsageError: they do not go together.
        """
        rows, groups = scales if len(scales) == 2 else (-1, -1)
        columns = groups * self.group_size
        wanted = {PACKED: (rows, -(-columns // 8)), ZERO: (-(-rows // 8), groups)}
        if tuple(packed) != wanted[PACKED] or (zeros is not None and tuple(zeros) != wanted[ZERO]):
            beside = f" and {module}{ZERO} {list(zeros)}" if zeros is not None else ""
            raise UsageError(
                f"{where}: {module}{SCALE} has the shape {list(scales)}, which does not go with {module}{PACKED} "
                f"{list(packed)}{beside} in groups of {self.group_size} columns; is it the config.json of this "
                "checkpoint?"
            )

    @staticmethod
    def check_order(module: str, names: Container[str], *, where: str) -> None:
        """See that the columns of a stored weight are in the order of their groups.

        Args:
            module: what its tensors' names begin with, with the dot behind it.
            names: of all tensors of the checkpoint.
            where: the checkpoint, for the error.

        Raises:
            UsageError: a tensor says which group each column is of.
        """
        if module + COLUMN_GROUPS in names:
            raise UsageError(
                f"{where}: {module}{COLUMN_GROUPS} says which group each column is of (actorder 'group'), and groups "
                f"are read in order alone; {INT4_REMEDY}."
            )

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], *, where: str) -> Int4Format:
        """The format that a config.json declares; of a model with pictures, in its text_config.

        Raises:
            UsageError: none, or another one.
        """
        config = quantization_config_of(hf_config)
        if not config:
            raise UsageError(f"{where} has no quantization_config; there is nothing to convert.")
        weights = _weights_of(config)
        if (config.get("format"), weights.get("num_bits"), weights.get("type")) != ("pack-quantized", 4, "int"):
            raise UsageError(
                f"{where}: the quantization_config is {config.get('quant_method')!r} in the format "
                f"{config.get('format')!r} with {weights.get('num_bits')!r} bits; known is compressed-tensors in the "
                "format 'pack-quantized' with integers of 4 bits."
            )
        if not isinstance(weights.get("group_size"), int) or weights["group_size"] < 1:
            raise UsageError(f"{where}: group_size {weights.get('group_size')!r} is no number of columns above 0.")
        ignored: Sequence[str] = config.get("ignore") or ()
        return cls(weights["group_size"], bool(weights.get("symmetric", True)), tuple(ignored))

    @classmethod
    def to_sync(cls, hf_config: Mapping[str, Any]) -> Int4Format:
        """The format of a checkpoint whose engines shall take a trainer's weights.

        Raises:
            UsageError: SGLang serves no such checkpoint, or its weights cannot be made by rounding; says why.
        """
        where = "the HF config"
        fmt, config = cls.of(hf_config, where=where), quantization_config_of(hf_config)
        weights, groups = _weights_of(config), config.get("config_groups") or {}
        targets = [target for group in groups.values() for target in group.get("targets") or ()]
        rows = (
            (
                not fmt.is_symmetric,
                "zero points (symmetric: false), for which SGLang's kernels of experts are not fed by a sync",
            ),
            (
                weights.get("actorder"),
                f"actorder {weights.get('actorder')!r}: an order of columns that a calibration on data has chosen",
            ),
            (
                weights.get("strategy", "group") != "group",
                f"strategy {weights.get('strategy')!r}; known is 'group'",
            ),
            (targets != ["Linear"], f"the targets {targets!r}; known is ['Linear'], with exceptions in 'ignore'"),
            (config.get("linear_fp8_config"), "linear_fp8_config: weights in fp8 beside those in int4"),
            (
                fmt.group_size % 8,
                f"group_size {fmt.group_size}; SGLang packs 8 columns into a number, and needs a multiple of 8",
            ),
        )
        for is_wrong, problem in rows:
            if is_wrong:
                raise UsageError(f"the quantization_config of {where} has {problem}; {INT4_REMEDY}.")
        return fmt


def quantization_config_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of quantisation; of a model with pictures, in its text_config. Empty: nothing."""
    text = hf_config.get("text_config") or {}
    return hf_config.get("quantization_config") or text.get("quantization_config") or {}


def _weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    return first.get("weights") or {}


WeightFormat = Fp8Format | Int4Format
"""Both say which tensors they quantise (`quantizes`), and what that takes (`stored_bytes`, `bytes_of_params`)."""


def weight_format_of(hf_config: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a config.json declares; None where it has no quantization_config.

    Raises:
        UsageError: a quantisation that weights cannot be synced in, and why.
    """
    config = quantization_config_of(hf_config)
    if isinstance(config, Mapping) and str(config.get("quant_method")).lower() in METHODS:
        return Int4Format.to_sync(hf_config)
    return Fp8Format.of(hf_config)


PROBES = {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj", "experts": "mlp.experts.0.down_proj"}


def quantized_parts(fmt: WeightFormat) -> tuple[str, ...]:
    """Which of a model's "attention", "mlp" and "experts" a format quantises, as its first layer shows."""
    return tuple(part for part, module in PROBES.items() if fmt.quantizes(f"model.layers.0.{module}.weight"))


def format_of_checkpoint(checkpoint: str | Path | None) -> WeightFormat | None:
    """The format of an HF directory; None without one, or without quantised weights.

    Raises:
        UsageError: as `weight_format_of`.
    """
    file = Path(checkpoint, "config.json") if checkpoint else None
    return weight_format_of(json.loads(file.read_text())) if file is not None and file.is_file() else None
