"""What the `quantization_config` of an HF checkpoint in 4-bit integers says (compressed-tensors, "pack-quantized").

A weight `<module>.weight` [N, K] is stored as `<module>.weight_packed` int32 [N, K / 8], `<module>.weight_scale` [N,
K / group], `<module>.weight_shape` (N and K) and, where it is asymmetric, `<module>.weight_zero_point`. It reads the
plain dict of config.json and imports no torch; the arithmetic is slime.utils.int4's.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from slime.utils.errors import UsageError

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
COLUMN_GROUPS = "weight_g_idx"
"""Which group each column is of, where they are not in order (actorder "group")."""
SHAPE_BYTES = 16
_LINEAR = re.compile(r".*\.layers\.\d+\..*((?<!\.eh)_proj(_with_mqa)?|\.experts\.\d+\.w[123])\.weight")
EXPERTS_ONLY = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts?\..*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
"""What Kimi-K2-Thinking leaves alone: everything but experts."""
METHODS = ("compressed-tensors", "compressed_tensors")
REMEDY = "make the checkpoint with tools/convert_hf_to_int4_direct.py, or use the unquantized one"


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
                f"are read in order alone; {REMEDY}."
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
        problem = None
        if not fmt.is_symmetric:
            problem = "zero points (symmetric: false), for which SGLang's kernels of experts are not fed by a sync"
        elif weights.get("actorder"):
            problem = f"actorder {weights['actorder']!r}: an order of columns that a calibration on data has chosen"
        elif weights.get("strategy", "group") != "group":
            problem = f"strategy {weights['strategy']!r}; known is 'group'"
        elif targets != ["Linear"]:
            problem = f"the targets {targets!r}; known is ['Linear'], with exceptions in 'ignore'"
        elif config.get("linear_fp8_config"):
            problem = "linear_fp8_config: weights in fp8 beside those in int4"
        if problem:
            raise UsageError(f"the quantization_config of {where} has {problem}; {REMEDY}.")
        if fmt.group_size % 8:
            raise UsageError(
                f"the quantization_config of {where} has group_size {fmt.group_size}; SGLang packs 8 columns into a "
                f"number, and needs a multiple of 8; {REMEDY}."
            )
        return fmt


def quantization_config_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of quantisation; of a model with pictures, in its text_config. Empty: nothing."""
    text = hf_config.get("text_config") or {}
    return hf_config.get("quantization_config") or text.get("quantization_config") or {}


def _weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    return first.get("weights") or {}
