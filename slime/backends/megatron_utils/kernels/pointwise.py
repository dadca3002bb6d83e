"""The rotation of rotary position embedding and SwiGLU, forward and backward, one triton kernel each way.

Computed in fp32 and rounded once. Why kernels by hand: see rms_norm.py beside it. Channels are rotated in pairs: by
halves i and i + dim/2 (GPT-NeoX), interleaved 2i and 2i + 1 (GPT-J).
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
BLOCK = 1024
"""Columns of a program of SwiGLU."""


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
        return _rotated(t, cos, sin, read, written, is_back=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        refuse_second_derivative()
        # of any stride, which may depend on the pack's length
        return _rotated(grad.contiguous(), *ctx.saved_tensors, *ctx.paired, is_back=True), None, None, None, None


def _rotated(
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
    _start_rotation((-(num_rows // -rows), 1, 1), (t, cos.contiguous(), sin.contiguous(), out), (num_rows,), constants)
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


_start_rotation = Launcher(_rotary)


class SwiGLU(torch.autograd.Function):
    """silu(y1) * y2 of the halves of y [n, 2 F] -> [n, F] (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        ctx.save_for_backward(y)
        out = y.new_empty(y.shape[0], y.shape[1] // 2)
        _start_forward(_grid(out), (*y.chunk(2, 1), out), (), (y.shape[1], out.shape[1], BLOCK))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        refuse_second_derivative()
        (y,) = ctx.saved_tensors
        of_y = torch.empty_like(y)
        tensors = (grad.contiguous(), *y.chunk(2, 1), *of_y.chunk(2, 1))
        _start_backward(_grid(grad), tensors, (), (y.shape[1], grad.shape[1], BLOCK))
        return of_y


def silu_product(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """silu(gate) * linear, all [..., F] on CUDA: SwiGLU of two matrix products."""
    width = gate.shape[-1]
    product: torch.Tensor = _SiluProduct.apply(gate.reshape(-1, width), linear.reshape(-1, width))
    return product.view_as(gate)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        gate, linear = gate.contiguous(), linear.contiguous()
        ctx.save_for_backward(gate, linear)
        out = torch.empty_like(gate)
        _start_forward(_grid(out), (gate, linear, out), (), (out.shape[1], out.shape[1], BLOCK))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_second_derivative()
        gate, linear = ctx.saved_tensors
        of_gate, of_linear = torch.empty_like(gate), torch.empty_like(linear)
        tensors = (grad.contiguous(), gate, linear, of_gate, of_linear)
        _start_backward(_grid(grad), tensors, (), (grad.shape[1], grad.shape[1], BLOCK))
        return of_gate, of_linear


def _grid(out: torch.Tensor) -> tuple[int, int, int]:
    return out.shape[0], -(out.shape[1] // -BLOCK), 1


@triton.jit
def _swiglu_forward(gate, linear, out, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """STRIDE: from one row of gate to the next, and of linear."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    g = tl.load(gate + row * STRIDE + column, mask=here, other=0.0).to(tl.float32)
    x = tl.load(linear + row * STRIDE + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (g * tl.sigmoid(g) * x).to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    grad, gate, linear, of_gate, of_linear, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    of_out = tl.load(grad + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    place = row * STRIDE + column
    g = tl.load(gate + place, mask=here, other=0.0).to(tl.float32)
    x = tl.load(linear + place, mask=here, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    derivative = of_out * x * s * (1.0 + g * (1.0 - s))
    tl.store(of_gate + place, derivative.to(of_gate.dtype.element_ty), mask=here)
    tl.store(of_linear + place, (of_out * g * s).to(of_linear.dtype.element_ty), mask=here)


_start_forward, _start_backward = Launcher(_swiglu_forward), Launcher(_swiglu_backward)
