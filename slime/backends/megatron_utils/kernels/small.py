"""Kernels by hand in triton: rotary position embedding, SwiGLU and RMSNorm, one kernel each way.

Everything is computed in fp32 and rounded once. torch's own RMSNorm takes the device several times as long on the
short rows of a head's norm. What torch.compile makes takes the host two to three times as long as torch's own for
every call, which decides where a rank has few tokens for each layer (benchmarks/gpu_fusion.py).

Channels are rotated in pairs: by halves i and i + dim/2 (GPT-NeoX), interleaved 2i and 2i + 1 (GPT-J). It needs
triton, which comes with torch's builds for CUDA.
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
        _start_swiglu_forward(_grid(out), (*y.chunk(2, 1), out), (), (y.shape[1], out.shape[1], BLOCK))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        refuse_second_derivative()
        (y,) = ctx.saved_tensors
        of_y = torch.empty_like(y)
        tensors = (grad.contiguous(), *y.chunk(2, 1), *of_y.chunk(2, 1))
        _start_swiglu_backward(_grid(grad), tensors, (), (y.shape[1], grad.shape[1], BLOCK))
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
        _start_swiglu_forward(_grid(out), (gate, linear, out), (), (out.shape[1], out.shape[1], BLOCK))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_second_derivative()
        gate, linear = ctx.saved_tensors
        of_gate, of_linear = torch.empty_like(gate), torch.empty_like(linear)
        tensors = (grad.contiguous(), gate, linear, of_gate, of_linear)
        _start_swiglu_backward(_grid(grad), tensors, (), (grad.shape[1], grad.shape[1], BLOCK))
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


_start_swiglu_forward, _start_swiglu_backward = Launcher(_swiglu_forward), Launcher(_swiglu_backward)


ELEMENTS = 4096
"""Elements that a program holds at a time, or one row where that is longer."""
PROGRAMS = 3
"""Programs of the backward kernel for each multiprocessor. Each sums the weight's gradient over its rows."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, with 1 + weight if `is_zero_centered` (arXiv 1910.07467).

    Args:
        x: [..., dim] or [..., heads, dim] on CUDA; the last dimension is dense, heads and tokens may have any stride.
        weight: [dim].

    Returns:
        as x, dense.
    """
    normed: torch.Tensor = _RMSNorm.apply(x, weight, eps, is_zero_centered)
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
        rows = x.flatten(0, -3) if x.dim() > 3 else x
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scales = x.new_empty(out.numel() // out.shape[-1], dtype=torch.float32)
        sizes, num_warps = _row_sizes(out.shape[-1])
        grid = (-(len(scales) // -sizes[-1]), 1, 1)
        constants = (*_strides(rows), *sizes, is_zero_centered)
        _start_norm_forward(grid, (rows, weight, out, scales), (len(scales), eps), constants, num_warps)
        ctx.save_for_backward(rows, weight, scales)
        ctx.constants = constants
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        refuse_second_derivative()
        rows, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        sizes, num_warps = _row_sizes(rows.shape[-1])
        num_tiles = -(len(scales) // -sizes[-1])
        num_programs = max(min(num_tiles, PROGRAMS * _multiprocessors(rows.device)), 1)
        of_x = torch.empty_like(grad)
        of_weight = scales.new_empty(num_programs, rows.shape[-1])
        tensors = (grad, rows, weight, scales, of_x, of_weight)
        numbers = (len(scales), -(num_tiles // -num_programs))
        _start_norm_backward((num_programs, 1, 1), tensors, numbers, ctx.constants, num_warps)
        return of_x, of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


@functools.cache
def _row_sizes(dim: int) -> tuple[tuple[int, int, int], int]:
    """DIM, BLOCK and ROWS of a program, and its warps."""
    block = triton.next_power_of_2(dim)
    return (dim, block, max(ELEMENTS // block, 1)), 8 if block <= ELEMENTS else 16


def _strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a token and of a head, and the number of heads: constants of a model.

    A dimension of size 1 may have any stride, so it counts for nothing: [1, T, dim] are T tokens.
    """
    if rows.dim() == 2 or rows.shape[1] == 1:
        return rows.stride(0) if rows.shape[0] > 1 else 0, 0, 1
    if rows.shape[0] == 1:
        return rows.stride(1), 0, 1
    return rows.stride(0), rows.stride(1), rows.shape[1]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU. Triton's interpreter has none, and any number works there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward(  # type: ignore[no-untyped-def]
    x, weight, out, scales, num_rows: tl.int64, eps, OF_TOKEN: tl.constexpr, OF_HEAD: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AROUND_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row, is_column = row < num_rows, column < DIM
    here = is_row[:, None] & is_column[None, :]
    start = (row // HEADS) * OF_TOKEN + (row % HEADS) * OF_HEAD
    values = tl.load(x + start[:, None] + column[None, :], mask=here, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / DIM + eps)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if AROUND_ONE:
        w += 1.0
    normed = values * scale[:, None] * w[None, :]
    tl.store(out + row[:, None] * DIM + column[None, :], normed.to(out.dtype.element_ty), mask=here)
    tl.store(scales + row, scale, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    grad, x, weight, scales, of_x, of_weight, num_rows: tl.int64, num_tiles: tl.int64,
    OF_TOKEN: tl.constexpr, OF_HEAD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AROUND_ONE: tl.constexpr,
):  # fmt: skip
    """With y = x * scale and g = grad * weight: of_x = (g - y mean(g y)) scale; of_weight = sum of grad y."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_column = column < DIM
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if AROUND_ONE:
        w += 1.0
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(num_tiles):
        row = (program * num_tiles + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        here = is_row[:, None] & is_column[None, :]
        start = (row // HEADS) * OF_TOKEN + (row % HEADS) * OF_HEAD
        scale = tl.load(scales + row, mask=is_row, other=0.0)[:, None]
        y = tl.load(x + start[:, None] + column[None, :], mask=here, other=0.0).to(tl.float32) * scale
        dense = row[:, None] * DIM + column[None, :]
        of_out = tl.load(grad + dense, mask=here, other=0.0).to(tl.float32)
        total += of_out * y
        g = of_out * w[None, :]
        found = (g - y * (tl.sum(g * y, 1) / DIM)[:, None]) * scale
        tl.store(of_x + dense, found.to(of_x.dtype.element_ty), mask=here)
    tl.store(of_weight + program * DIM + column, tl.sum(total, 0), mask=is_column)


_start_norm_forward, _start_norm_backward = Launcher(_rms_norm_forward), Launcher(_rms_norm_backward)
