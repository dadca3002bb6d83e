"""Weights as 8-bit floats (e4m3) or 4-bit integers with scales, and back: arithmetic on tensors, on any device.

fp8, per block, as DeepSeek-V3 (arXiv:2412.19437, section 3.3): s = max |w| / 448 over the block, in fp32, and q =
e4m3(clamp(w * (1 / s))), rounded to nearest even; 1/s is computed once a block and a product rounds alike on every
device, so the same weights give the same bytes everywhere, compiled or not. With `ue8m0`, s is rounded up to a power
of two. A tensor-wise scale is one block. What a linear layer is given is quantised by tokens (`quantize_rows`), with
the roundings of SGLang's kernel. Example: the block [[1, -2], [3, 448]] has s = 1 and is stored exactly; with 449 in
it, s = 449 / 448.

int4, per group of columns. Symmetric: s = max |w| / 7.5 over the group, rounded to the weight's dtype, and q =
round(w / s), in -8 .. 7, computed in fp32. Asymmetric: s = (max - min) / 15 with 0 between them, z = round(-8 - min /
s), q = round(w / s) + z; the weight is (q - z) s. Eight values lie in an int32, the first in the lowest bits, each
with 8 added (as compressed-tensors packs them). Nothing here knows names, checkpoints or engines.

Example: the group [7.5, -7.5, 1, 0] has s = 1 and becomes [7, -8, 1, 0]: the weight 7.5 comes back as 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.utils.accelerator.fusion import fused_on_cuda

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_MAX = 1e-12
"""Taken for the largest value of a block that is smaller, or all zero: its values become zero."""
SMALLEST_ROW_MAX = 1e-10
"""The same of a group of activations: SGLang's."""


def quantize_blocks(
    weight: torch.Tensor, block_size: tuple[int, int], *, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix with one scale a block; blocks at its lower and right edge may be smaller.

    A value that is infinite or no number gives a scale that is not finite: callers look at the scales.

    Args:
        weight: [N, K], fp32, bf16 or fp16.
        block_size: (bn, bk) rows and columns.
        ue8m0: round scales up to powers of two.

    Returns:
        e4m3 values [N, K], and fp32 scales [ceil(N / bn), ceil(K / bk)].
    """
    (rows, columns), (block_rows, block_columns) = weight.shape, block_size
    missing = (-rows % block_rows, -columns % block_columns)
    padded = F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight
    blocks = padded.contiguous().unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
    scales = _scales(_block_max(blocks), ue8m0=ue8m0)
    values = _scaled(blocks, scales.reciprocal()).flatten(2, 3).flatten(0, 1)
    return (values[:rows, :columns].contiguous() if any(missing) else values), scales


def quantize_tensor(
    weight: torch.Tensor, *, largest: torch.Tensor | None = None, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix with one scale.

    Args:
        weight: [N, K].
        largest: scalar, max |w| over more than this tensor, where several must share a scale.
        ue8m0: round the scale up to a power of two.

    Returns:
        e4m3 values [N, K], and the fp32 scale [1].
    """
    found = largest_of(weight) if largest is None else largest
    scale = _scales(found.float().reshape(1), ue8m0=ue8m0)
    blocks = _rows_as_blocks(weight)
    return _scaled(blocks, scale.reciprocal().expand(len(blocks), 1))[:, 0, 0], scale


def quantize_rows(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations with one scale for each token's next `group` channels, as SGLang 0.5.17's kernel does.

    It multiplies by 448 times the reciprocal of the largest value, where weights are multiplied by the reciprocal of
    their scale: another last bit. (The kernel's reciprocal is the GPU's approximate one, which now and then rounds a
    value that lies between two e4m3 numbers to the other one.) A row of zeros stays zeros.

    Args:
        rows: [T, K], K a multiple of `group`.
        group: channels that share a scale.

    Returns:
        e4m3 values [T, K], and fp32 scales [T, K / group].
    """
    blocks = rows.contiguous().unflatten(1, (-1, group))[:, None]
    largest = _block_max(blocks).clamp(min=SMALLEST_ROW_MAX)
    return _scaled(blocks, largest.reciprocal() * E4M3_MAX).flatten(1), largest * (1 / E4M3_MAX)


def largest_of(weight: torch.Tensor) -> torch.Tensor:
    """max |w| of a matrix, fp32 scalar."""
    return _block_max(_rows_as_blocks(weight)).amax()


def _rows_as_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [N, 1, 1, K]: only dimension 0 may change without a new compilation."""
    return weight.contiguous()[:, None, None, :]


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, block_size: tuple[int, int] | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return value times scale, computed in fp32.

    Args:
        values: e4m3 [..., N, K].
        scales: [..., ceil(N / bn), ceil(K / bk)], or one number where there are no blocks.
        block_size: (bn, bk), or None.
        dtype: of the result.
    """
    if block_size is None:
        return (values.float() * scales.float().reshape(())).to(dtype)
    rows, columns = values.shape[-2:]
    by_row = scales.float().repeat_interleave(block_size[0], dim=-2)[..., :rows, :]
    return (values.float() * by_row.repeat_interleave(block_size[1], dim=-1)[..., :columns]).to(dtype)


def _scales(largest: torch.Tensor, *, ue8m0: bool) -> torch.Tensor:
    """Scales of blocks with these largest absolute values (fp32)."""
    # By a tensor: by a number, CUDA would multiply with its reciprocal, which rounds differently.
    scales = largest.clamp(min=SMALLEST_MAX) / torch.full_like(largest, E4M3_MAX)
    return round_up_to_power_of_two(scales) if ue8m0 else scales


def round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is no less, of positive normal fp32 numbers; inf and nan stay."""
    bits = scales.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return torch.where(scales.isfinite(), (exponent << 23).view(torch.float32), scales)


@fused_on_cuda
def _block_max(blocks: torch.Tensor) -> torch.Tensor:
    """[n, bn, k, bk] -> max |w| of each block, fp32 [n, k]."""
    return blocks.abs().amax(dim=(1, 3)).float()


@fused_on_cuda
def _scaled(blocks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[n, bn, k, bk] times [n, k] as e4m3."""
    return (blocks.float() * factors[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


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
