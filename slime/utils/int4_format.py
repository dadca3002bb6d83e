"""What the `quantization_config` of an HF checkpoint in 4-bit integers says (compressed-tensors, "pack-quantized").

A weight `<module>.weight` [N, K] is stored as `<module>.weight_packed` int32 [N, K / 8], `<module>.weight_scale` [N,
K / group], `<module>.weight_shape` (N and K) and, where it is asymmetric, `<module>.weight_zero_point`. It reads the
plain dict of config.json; the arithmetic is slime.utils.int4's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import UsageError

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
_LINEAR = re.compile(r".*\.layers\.\d+\..*(?<!\.eh)_proj(_with_mqa)?\.weight")
EXPERTS_ONLY = (
    "lm_head",
    r"re:.*self_attn.*",
    r"re:.*shared_experts?\..*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
"""What Kimi-K2-Thinking leaves alone: everything but experts."""


@dataclass(frozen=True)
class Int4Format:
    """How the weights of an int4 checkpoint are stored.

    Attributes:
        group_size: columns that share a scale.
        is_symmetric: there are no zero points.
        ignored: modules that keep their weights: a path, or "re:" and a regular expression that matches its beginning.
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
            re.match(rule[3:], module) if rule.startswith("re:") else rule == module for rule in self.ignored
        )

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

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], *, where: str) -> Int4Format:
        """The format that a config.json declares; of a model with pictures, in its text_config.

        Raises:
            UsageError: none, or another one.
        """
        text = hf_config.get("text_config") or {}
        config = hf_config.get("quantization_config") or text.get("quantization_config")
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


def _weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    return first.get("weights") or {}
