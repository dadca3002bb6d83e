"""Quantise a bucket of HF tensors as the engines' checkpoint stores them, whatever its format; None: not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors import quantizer_fp8, quantizer_int4
from slime.backends.megatron_utils.megatron_to_hf.processors.finite import QuantizationError
from slime.conversion.reader import TensorInfo
from slime.weights.formats import Int4Format, WeightFormat

__all__ = ["QuantizationError", "planned", "quantize_bucket", "stored_bytes"]

Bucket = list[tuple[str, torch.Tensor]]


def quantize_bucket(bucket: Bucket, fmt: WeightFormat | None) -> Bucket:
    """Return the tensors of `bucket` in their order, each quantised one followed by what belongs to it.

    Args:
        bucket: (HF name, full tensor); gate and up of an expert are in the same bucket.
        fmt: what the checkpoint wants; None changes nothing.

    Raises:
        QuantizationError: a weight cannot be stored so; names it.
    """
    if fmt is None:
        return bucket
    if isinstance(fmt, Int4Format):
        return quantizer_int4.quantize_bucket(bucket, fmt)
    return quantizer_fp8.quantize_bucket(bucket, fmt)


def stored_bytes(bucket: Iterable[tuple[str, torch.Tensor]], fmt: WeightFormat | None) -> int:
    """Bytes of a bucket once it is quantised."""
    if fmt is None:
        return sum(tensor.nbytes for _, tensor in bucket)
    return sum(fmt.stored_bytes(name, tuple(t.shape), itemsize=t.element_size()) for name, t in bucket)


def planned(tensors: Mapping[str, TensorInfo], fmt: WeightFormat | None) -> dict[str, TensorInfo]:
    """What `quantize_bucket` makes of tensors like these, without their values; in the same order."""
    if fmt is None:
        return dict(tensors)
    if isinstance(fmt, Int4Format):
        return quantizer_int4.planned(tensors, fmt)
    return quantizer_fp8.planned(tensors, fmt)
