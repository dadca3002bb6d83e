"""SwiGLU, forward and backward, one triton kernel each.

Computed in fp32 and rounded once. Why kernels by hand: see rms_norm.py beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from slime.backends.megatron_utils.kernels.launch import Launcher, refuse_second_derivative

BLOCK = 1024


class SwiGLU(torch.autograd.Function):
    """silu(y1) * y2 of the halves of y [n, 2 F] -> [n, F] (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        ctx.save_for_backward(y)
        out = y.new_empty(y.shape[0], y.shape[1] // 2)
        _start_forward(_grid(out), (y, out), (), (out.shape[1], BLOCK))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        refuse_second_derivative()
        (y,) = ctx.saved_tensors
        of_y = torch.empty_like(y)
        _start_backward(_grid(grad), (grad.contiguous(), y, of_y), (), (grad.shape[1], BLOCK))
        return of_y


def _grid(out: torch.Tensor) -> tuple[int, int, int]:
    return out.shape[0], -(out.shape[1] // -BLOCK), 1


@triton.jit
def _swiglu_forward(y, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    gate = tl.load(y + row * (2 * WIDTH) + column, mask=here, other=0.0).to(tl.float32)
    linear = tl.load(y + row * (2 * WIDTH) + WIDTH + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate * tl.sigmoid(gate) * linear).to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(grad, y, of_y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    of_out = tl.load(grad + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    first = row * (2 * WIDTH) + column
    gate = tl.load(y + first, mask=here, other=0.0).to(tl.float32)
    linear = tl.load(y + first + WIDTH, mask=here, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    of_gate = of_out * linear * s * (1.0 + gate * (1.0 - s))
    tl.store(of_y + first, of_gate.to(of_y.dtype.element_ty), mask=here)
    tl.store(of_y + first + WIDTH, (of_out * gate * s).to(of_y.dtype.element_ty), mask=here)


_start_forward, _start_backward = Launcher(_swiglu_forward), Launcher(_swiglu_backward)
