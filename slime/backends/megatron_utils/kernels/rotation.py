"""The rotation of rotary position embedding, forward and backward, as one triton kernel.

Channels are rotated in pairs: by halves i and i + dim/2 (GPT-NeoX), interleaved 2i and 2i + 1 (GPT-J). Computed in
fp32 and rounded once. Why a kernel by hand: see rms_norm.py beside it. It does not know the angles' source.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from slime.backends.megatron_utils.kernels.launch import Launcher, refuse_second_derivative

TILE = 2048
"""Pairs that a program rotates."""


def rotate(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, are_read_paired: bool, are_written_paired: bool
) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair of channels (RoFormer, arXiv 2104.09864).

    Args:
        t: [T, heads, dim] on CUDA; the last dimension is dense, the others may have any stride.
        cos, sin: [T, 1, dim], dense, by the channels as they are written.
        are_read_paired: a and b lie side by side in t, otherwise half of dim apart.
        are_written_paired: the same for the result.

    Returns:
        [T, heads, dim], dense.
    """
    rotated: torch.Tensor = _Rotation.apply(t, cos, sin, are_read_paired, are_written_paired)
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, read: bool, written: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.paired = (written, read)
        return _launch(t, cos, sin, read, written, is_back=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        refuse_second_derivative()
        # of any stride, which may depend on the pack's length
        return _launch(grad.contiguous(), *ctx.saved_tensors, *ctx.paired, is_back=True), None, None, None, None


def _launch(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, read: bool, written: bool, *, is_back: bool
) -> torch.Tensor:
    t = t if t.stride(-1) == 1 else t.contiguous()
    num_tokens, heads, dim = t.shape
    block, rows = _sizes(dim // 2)
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    num_rows = num_tokens * heads
    # constants of a model; a dimension of size 1 may have any stride
    strides = t.stride(0) if num_tokens > 1 else 0, t.stride(1) if heads > 1 else 0
    constants = (*strides, heads, dim // 2, block, rows, read, written, is_back)
    _start((-(num_rows // -rows), 1, 1), (t, cos.contiguous(), sin.contiguous(), out), (num_rows,), constants)
    return out


@functools.cache
def _sizes(half: int) -> tuple[int, int]:
    """BLOCK and ROWS of a program."""
    block = triton.next_power_of_2(half)
    return block, max(TILE // block, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _rotary(  # type: ignore[no-untyped-def]
    t, cos, sin, out, num_rows: tl.int64, OF_TOKEN: tl.constexpr, OF_HEAD: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    READ_PAIRED: tl.constexpr, WRITTEN_PAIRED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Back, the gradient of what was written is read: by the angles of the channels that are read."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)[None, :]
    here = (row < num_rows)[:, None] & (pair < HALF)
    if READ_PAIRED:
        read_a, read_b = 2 * pair, 2 * pair + 1
    else:
        read_a, read_b = pair, pair + HALF
    if WRITTEN_PAIRED:
        written_a, written_b = 2 * pair, 2 * pair + 1
    else:
        written_a, written_b = pair, pair + HALF
    token = (row // HEADS)[:, None]
    source = t + token * OF_TOKEN + (row % HEADS)[:, None] * OF_HEAD
    a = tl.load(source + read_a, mask=here, other=0.0).to(tl.float32)
    b = tl.load(source + read_b, mask=here, other=0.0).to(tl.float32)
    angle_a = token * (2 * HALF) + (read_a if BACK else written_a)
    angle_b = token * (2 * HALF) + (read_b if BACK else written_b)
    cos_a = tl.load(cos + angle_a, mask=here, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle_b, mask=here, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle_a, mask=here, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle_b, mask=here, other=0.0).to(tl.float32)
    if BACK:
        new_a, new_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        new_a, new_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    target = out + row[:, None] * (2 * HALF)
    tl.store(target + written_a, new_a.to(out.dtype.element_ty), mask=here)
    tl.store(target + written_b, new_b.to(out.dtype.element_ty), mask=here)


_start = Launcher(_rotary)
