"""RMSNorm over the last dimension, forward and backward, in triton.

One kernel each way: torch's own takes the device several times as long on the short rows of a head's norm, and what
torch.compile makes takes the host two to three times as long as torch's own for every call, which decides where a rank
has few tokens for each layer (benchmarks/gpu_fusion.py). Everything is computed in fp32 and rounded once. It needs
triton, which comes with torch's builds for CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from slime.backends.megatron_utils.kernels.launch import Launcher, refuse_second_derivative

TILE = 4096
"""Elements that a program holds at a time, or one row where that is longer."""
PROGRAMS = 3
"""Of the backward kernel for each multiprocessor; each sums the weight's gradient over its rows."""


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
        sizes, num_warps = _sizes(out.shape[-1])
        grid = (-(len(scales) // -sizes[-1]), 1, 1)
        constants = (*_strides(rows), *sizes, is_zero_centered)
        _start_forward(grid, (rows, weight, out, scales), (len(scales), eps), constants, num_warps)
        ctx.save_for_backward(rows, weight, scales)
        ctx.constants = constants
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        refuse_second_derivative()
        rows, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        sizes, num_warps = _sizes(rows.shape[-1])
        num_tiles = -(len(scales) // -sizes[-1])
        num_programs = max(min(num_tiles, PROGRAMS * _multiprocessors(rows.device)), 1)
        of_x = torch.empty_like(grad)
        of_weight = scales.new_empty(num_programs, rows.shape[-1])
        tensors = (grad, rows, weight, scales, of_x, of_weight)
        numbers = (len(scales), -(num_tiles // -num_programs))
        _start_backward((num_programs, 1, 1), tensors, numbers, ctx.constants, num_warps)
        return of_x, of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


@functools.cache
def _sizes(dim: int) -> tuple[tuple[int, int, int], int]:
    """DIM, BLOCK and ROWS of a program, and its warps."""
    block = triton.next_power_of_2(dim)
    return (dim, block, max(TILE // block, 1)), 8 if block <= TILE else 16


def _strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Of a token, of a head, and heads of a token: constants of a model.

    A dimension of size 1 may have any stride, so it counts for nothing: [1, T, dim] are T tokens.
    """
    if rows.dim() == 2 or rows.shape[1] == 1:
        return rows.stride(0) if rows.shape[0] > 1 else 0, 0, 1
    if rows.shape[0] == 1:
        return rows.stride(1), 0, 1
    return rows.stride(0), rows.stride(1), rows.shape[1]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; triton's interpreter has none, and any number will do."""
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


_start_forward, _start_backward = Launcher(_rms_norm_forward), Launcher(_rms_norm_backward)
