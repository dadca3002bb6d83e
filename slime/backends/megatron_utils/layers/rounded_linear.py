"""Megatron's linear layers with another product on a rank: weights, and inputs, rounded to fewer bits.

Gathering, reducing and adding to Megatron's gradient buffers are as in Megatron's own autograd functions
(tensor_parallel/layers.py of 0.16.1), overlapped with the products in the same way. A `Rounding` says what is
multiplied with what: `Int4Weights` here, and those of fp8_linears.py.

With int4 weights a layer is trained straight through. A weight W is replaced by Q(W), the bf16 (on CPU: fp32) values
that slime.weights.quantization makes of it for a sync, dequantised: output = x Q(W)^T, gradient of x = grad Q(W),
gradient of W = grad^T x, as if Q were the identity. So the policy that is trained is the one that generates, and small
updates add up in the master weights until a value rounds elsewhere. Weights are rounded at every pass; nothing is
kept. Groups lie along a weight's columns, so that rows may lie in Megatron's order, and a tensor-parallel rank rounds
its share by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import (
    custom_bwd,
    custom_fwd,
    dist_all_gather_func,
    dist_reduce_scatter_func,
)

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts, grouped_product
from slime.backends.megatron_utils.megatron_patch.without_apex import add_weight_gradient
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.megatron.precision.int4_plan import FLAG, Int4Training
from slime.config.megatron.precision.linear_plan import EXPERTS, OF_EXPERT
from slime.utils.errors import UsageError
from slime.weights.quantization import dequantize_groups, quantize_groups

logger = logging.getLogger(__name__)

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


def numbered_layers(models: Sequence[torch.nn.Module]) -> Iterator[tuple[int, Any]]:
    """(number in the whole model, from 0; decoder layer) of chunks, in Megatron's 16-bit wrapper or bare."""
    for model in models:
        for layer in unwrap(model).decoder.layers:
            yield layer.layer_number - 1, layer  # Megatron counts from 1, over all pipeline stages


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
    return cast(
        torch.Tensor,
        _RoundedLinear.apply(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group, rounding
        ),
    )


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


# ---- weights rounded to int4


def round_weights_to_int4(models: Sequence[torch.nn.Module], plan: Int4Training | None) -> None:
    """Let all linear layers that the checkpoint has in int4 compute with rounded weights.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        plan: None changes nothing.

    Raises:
        UsageError: a weight of this rank has columns that are not whole groups.
    """
    if plan is None:
        return
    rounded, count = Int4Weights(plan.fmt.group_size), 0
    for number, layer in numbered_layers(models):
        for name, module in linears_of(layer):
            if plan.takes(number, name):
                _check_width(f"layer {number}: {name}", module.weight, plan.fmt.group_size)
                compute_with(module, rounded)
                count += 1
        experts = getattr(layer.mlp, "experts", None)
        if isinstance(experts, GroupedExperts) and all(plan.takes(number, name) for name in OF_EXPERT):
            for name, weight in experts.named_parameters():
                _check_width(f"layer {number}: {name}", weight, plan.fmt.group_size)
            experts.multiply_with(rounded.grouped_product, of_rows=rounded.grouped_of_rows)
            count += 2 * len(experts.local_experts)
    logger.info("%d weights are rounded to int4 in groups of %d where they are used", count, plan.fmt.group_size)


def _check_width(what: str, weight: torch.Tensor, group_size: int) -> None:
    if weight.shape[1] % group_size:
        raise UsageError(
            f"{FLAG}: {what} has {weight.shape[1]} columns on a rank, which are not whole groups of {group_size}; "
            "change the layout, or unset it."
        )


class Int4Weights(NamedTuple):
    """The products of a linear layer (`Rounding`), and of experts, with rounded weights."""

    group_size: int

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [T, in] times a weight [out, in] transposed -> [T, out]."""
        return rows @ self._rounded(weight).t()

    def gradients(self, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, WeightGradient]:
        """Compute the gradients, see `Rounding.gradients`."""
        return gradients_of_16_bit(grad, self._rounded(weight))

    def grouped_product(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """Multiply each expert's rows with its rounded weight, see `grouped_experts.grouped_product`."""
        return grouped_product(rows, [self._rounded(weight).t() for weight in weights], counts, offsets)

    def grouped_of_rows(
        self, grad: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """The gradient [T, in] of the rows of `grouped_product`, of grad [T, out]."""
        return grouped_product(grad, [self._rounded(weight) for weight in weights], counts, offsets)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        values, scales, _ = quantize_groups(weight.detach(), self.group_size)
        return dequantize_groups(values, scales, self.group_size, dtype=weight.dtype)
