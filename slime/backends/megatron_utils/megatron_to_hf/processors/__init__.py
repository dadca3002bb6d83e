"""What is done to HF tensors after they are renamed and before they leave the trainer: quantising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.args import Args

if TYPE_CHECKING:
    import torch

__all__ = ["quantize_params"]


def quantize_params(
    args: Args,
    megatron_name: str,
    converted_named_params: Sequence[tuple[str, torch.Tensor]],
    quantization_config: Mapping[str, Any] | None,
) -> list[tuple[str, torch.Tensor]]:
    """Return HF (name, tensor) pairs as `quantization_config` wants them; unchanged where it is None.

    Args:
        args: unused; part of the public signature.
        megatron_name: unused; part of the public signature.
        converted_named_params: of one Megatron parameter.
        quantization_config: of the HF config.

    Raises:
        UsageError: a quantisation that is not supported.
        QuantizationError: a weight that cannot be stored so.
    """
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket
    from slime.weights.formats import weight_format_of

    return quantize_bucket(
        list(converted_named_params), weight_format_of({"quantization_config": quantization_config or None})
    )
