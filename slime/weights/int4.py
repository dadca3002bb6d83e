"""Weights as 4-bit integers with a scale for each group of columns, and back: arithmetic on tensors, on any device.

Symmetric: s = max |w| / 7.5 over the group, rounded to the weight's dtype, and q = round(w / s), in -8 .. 7, computed
in fp32. Asymmetric: s = (max - min) / 15 with 0 between them, z = round(-8 - min / s), q = round(w / s) + z; the
weight is (q - z) s. Eight values lie in an int32, the first in the lowest bits, each with 8 added (as
compressed-tensors packs them). Nothing here knows names, checkpoints or engines.

Example: the group [7.5, -7.5, 1, 0] has s = 1 and becomes [7, -8, 1, 0]: the weight 7.5 comes back as 7.
"""

from __future__ import annotations

import torch

LOWEST, HIGHEST, PER_INT32 = -8, 7, 8


def quantize_groups(
    weight: torch.Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise a matrix with one scale for `group_size` columns of a row.

    A value that is infinite or no number gives a scale that is not finite: callers look at the scales.

    Args:
        weight: [N, K], K a multiple of group_size.

    Returns:
        values int8 [N, K] in -8 .. 7; scales [N, K / group_size] in the weight's dtype; zero points int8 of that
        shape, None where it is symmetric.
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    if symmetric:
        span, zeros = _divided(groups.abs().amax(2), 7.5), None
    else:
        lowest, highest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        span = _divided(highest - lowest, 15)
    smallest = torch.finfo(weight.dtype).tiny
    scales = span.to(weight.dtype).where(span.to(weight.dtype) != 0, torch.full_like(span, smallest).to(weight.dtype))
    values = (groups / scales.float()[:, :, None]).round()
    if not symmetric:
        zeros = (LOWEST - lowest / scales.float()).round().clamp(LOWEST, HIGHEST)
        values = values + zeros[:, :, None]
    values = values.clamp(LOWEST, HIGHEST).nan_to_num(0).to(torch.int8).flatten(1)
    return values, scales, None if zeros is None else zeros.nan_to_num(0).to(torch.int8)


def _divided(sizes: torch.Tensor, by: float) -> torch.Tensor:
    # By a tensor: by a number, CUDA would multiply with its reciprocal, which rounds differently.
    return sizes / torch.full_like(sizes, by)


def dequantize_groups(
    values: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    zeros: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return (value - zero point) times scale, computed in fp32.

    Args:
        values: int8 [N, K].
        scales: [N, K / group_size].
        zeros: int8 of the scales' shape, or None.
        dtype: of the result.
    """
    groups = values.float().unflatten(1, (-1, group_size))
    if zeros is not None:
        groups = groups - zeros.float()[:, :, None]
    return (groups * scales.float()[:, :, None]).flatten(1).to(dtype)


def pack(values: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """int8 in -8 .. 7 -> int32, eight of them in one along `dim`, which is filled up to a multiple of 8."""
    if dim == 0:
        return pack(values.T.contiguous()).T.contiguous()
    missing = -values.shape[1] % PER_INT32
    nibbles = torch.nn.functional.pad(values, (0, missing), value=LOWEST).to(torch.int16) - LOWEST
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)  # two of them are a byte, and four bytes an int32
    return pairs.to(torch.uint8).contiguous().view(torch.int32)


def unpack(packed: torch.Tensor, size: int, dim: int = 1) -> torch.Tensor:
    """The inverse of `pack`; `size` is the number of values along `dim`."""
    if dim == 0:
        return unpack(packed.T.contiguous(), size).T.contiguous()
    pairs = packed.contiguous().view(torch.uint8).to(torch.int8)
    low, high = (pairs & 15) + LOWEST, ((pairs >> 4) & 15) + LOWEST
    return torch.stack((low, high), 2).flatten(1)[:, :size].contiguous()
