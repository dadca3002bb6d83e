"""Megatron's linear layers with another product on a rank: weights, and inputs, rounded to fewer bits.

Gathering, reducing and adding to Megatron's gradient buffers are as in Megatron's own autograd functions
(tensor_parallel/layers.py of 0.16.1), overlapped with the products in the same way. A `Rounding` says what is
multiplied with what. fp8_forward.py, fp8_training.py and int4_weights.py have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import (
    custom_bwd,
    custom_fwd,
    dist_all_gather_func,
    dist_reduce_scatter_func,
)

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts
from slime.backends.megatron_utils.megatron_patch.without_apex import add_weight_gradient
from slime.config.megatron.precision.linear_plan import EXPERTS

WeightGradient = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""(input [T, in], main_grad [out, in] or None) -> the gradient [out, in]; None where it was added to main_grad."""


class Rounding(Protocol):
    """The products of a linear layer with this rank's weight [out, in]."""

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [T, in] times the weight transposed -> [T, out]."""

    def gradients(self, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, WeightGradient]:
        """Of grad [T, out]: the gradient [T, in] of what came in, and how the weight's is computed once that is there.

        The second is not called for a weight that takes no gradient.
        """


def gradients_of_16_bit(grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, WeightGradient]:
    """What `Rounding.gradients` returns where nothing is rounded in the backward pass: Megatron's gradients."""
    return grad @ weight, partial(weight_gradient, grad)


def weight_gradient(grad: torch.Tensor, rows: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
    """grad [T, out] transposed times rows [T, in], added to main_grad where there is one."""
    if main_grad is None:
        return grad.t() @ rows
    add_weight_gradient(rows, grad, main_grad)
    return None


def linears_of(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """A decoder layer's linear layers by their names in it; of experts only those that are computed one by one."""
    grouped = any(isinstance(module, GroupedExperts) for module in layer.modules())
    for name, module in layer.named_modules():
        if grouped and name.startswith(EXPERTS + "."):
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, module


def compute_with(linear: Any, rounding: Rounding) -> None:
    """Let one of Megatron's linear layers compute its products so."""
    linear._forward_impl = partial(rounded_linear, rounding=rounding)


def rounded_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Any = None,
    *,
    rounding: Rounding,
) -> torch.Tensor:
    """What Megatron's linear layers call, by these names, for their product with a rank's weight [out, in].

    `grad_output_buffer` belongs to the output layer alone, which is never rounded.

    Returns:
        [..., out], of all the sequence where `sequence_parallel` says that `input` is a part of it.
    """
    output: torch.Tensor = _RoundedLinear.apply(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group, rounding
    )
    return output


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adds_to_main_grad: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        rounding: Rounding,
    ) -> torch.Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if adds_to_main_grad else None
        ctx.uses_bias, ctx.rounding, ctx.shape = bias is not None, rounding, input.shape
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        whole = _gather(input, tp_group)[0] if sequence_parallel else input
        output = rounding.product(whole.flatten(0, -2), weight).unflatten(0, whole.shape[:-1])
        return output if bias is None else output + bias

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # As Megatron's: with CUDA_DEVICE_MAX_CONNECTIONS=1 each exchange starts before the product that hides it.
        input, weight = ctx.saved_tensors
        grad, handle, whole = grads[0].contiguous().flatten(0, -2), None, input
        if ctx.sequence_parallel and input is not None:
            whole, handle = _gather(input, ctx.tp_group, async_op=True)
        of_input, of_weight = ctx.rounding.gradients(grad, weight)
        if handle is not None:
            handle.wait()
        of_input, handle = _reduced(ctx, of_input)
        of_bias = grad.sum(dim=0) if ctx.uses_bias else None
        found = None if input is None else _gradient_of(weight, ctx.main_grad, of_weight, whole.flatten(0, -2))
        if handle is not None:
            handle.wait()
        return of_input, found, of_bias, None, None, None, None, None


def _gather(input: torch.Tensor, group: Any, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    """[s / TP, b, in] -> [s, b, in], in Megatron's buffer for it, and what to wait for."""
    size = [input.shape[0] * group.size(), *input.shape[1:]]
    whole: torch.Tensor = get_global_memory_buffer().get_tensor(size, input.dtype, "mpu")
    return whole, dist_all_gather_func(whole, input, group=group, async_op=async_op)


def _reduced(ctx: Any, of_input: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Begin to sum the gradient [T, in] over tensor-parallel ranks: in the shape of the input, what to wait for."""
    if ctx.sequence_parallel:
        mine = of_input.new_empty(ctx.shape)
        whole = of_input.view(-1, *ctx.shape[1:])
        return mine, dist_reduce_scatter_func(mine, whole, group=ctx.tp_group, async_op=True)
    of_input = of_input.view(ctx.shape)
    if not ctx.allreduce_dgrad:
        return of_input, None
    return of_input, torch.distributed.all_reduce(of_input, group=ctx.tp_group, async_op=True)


def _gradient_of(
    weight: torch.Tensor, main_grad: torch.Tensor | None, of_weight: WeightGradient, rows: torch.Tensor
) -> torch.Tensor | None:
    found = of_weight(rows, main_grad)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return found
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)  # not read: Megatron's hooks wait for one
