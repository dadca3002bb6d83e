"""How the engines' checkpoint stores weights: as they are, in fp8 or in int4; found in config.json, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.fp8_format import Fp8Format
from slime.utils.int4_format import METHODS, Int4Format, quantization_config_of

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
