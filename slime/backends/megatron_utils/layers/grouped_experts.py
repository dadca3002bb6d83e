"""All experts of a rank in one grouped matrix product: --moe-grouped-gemm.

Each expert keeps parameters of its own, named and saved as in Megatron's SequentialMLP, so that checkpoints, loading,
weight sync and resharding know nothing of the grouping. The product takes one tensor [experts, out, in]: Megatron's
data-parallel buffers hold the weights of a layer's experts at equal distances, so that it is a view of them; a model
outside of such buffers pays for a copy. Where torch._grouped_mm does not work (CPU, other types than bfloat16) the
experts are multiplied one by one, which gives the numbers of SequentialMLP.

The gradients of weights are products of their own for each expert, because torch cannot add a grouped product to
Megatron's fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP

from slime.backends.megatron_utils.layers.gathered_weights import wait_for_weights
from slime.backends.megatron_utils.megatron_patch.without_apex import add_weight_gradient
from slime.utils.accelerator import to_device

Weights = Sequence[torch.Tensor]
Product = Callable[[torch.Tensor, Weights, Sequence[int], torch.Tensor], torch.Tensor]


class GroupedExperts(SequentialMLP):
    """Megatron's SequentialMLP, computed as this module's docstring says."""

    local_experts: torch.nn.ModuleList

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _LastFirst(self.local_experts)
        recomputed = self.config.recompute_modules if self.config.recompute_granularity == "selective" else ()
        self._recomputes_activation = "moe_act" in (recomputed or ())
        self._products: tuple[Product, Product] = _product, grouped_product
        self._weighs_last = False

    def multiply_with(self, product: Product, *, of_rows: Product | None = None, weigh_last: bool = False) -> None:
        """Compute the forward pass with another product; gradients of weights stay those of `_product`.

        Args:
            product: as `_product`.
            of_rows: the gradient of the rows; None leaves that of `_product`, too.
            weigh_last: the router's weights multiply an expert's output, as in SGLang, not what its second linear
                layer is given, as in Megatron: the same but for roundings, and for what a product rounds its input to.
        """
        self._products, self._weighs_last = (product, of_rows or grouped_product), weigh_last

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[T, H] rows, those of an expert together -> [T, H]; [experts] how many, and [T] the rows' weights."""
        counts = tokens_per_expert.tolist()
        rows = permuted_local_hidden_states
        offsets = to_device(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), rows.device)
        fused = self.config.gradient_accumulation_fusion
        linear: Callable[..., torch.Tensor] = partial(GroupedLinear.apply, self._products, counts, offsets, fused)
        fc1, fc2 = (
            [expert.get_submodule(name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        )
        if self._forward_pre_hooks:  # every module has one, or none: there may be hundreds
            wait_for_weights(*self.local_experts.modules())
        hidden = _with_adapters(linear(rows, *(layer.weight for layer in fc1)), rows, fc1, linear)
        activate, checkpoint = partial(_activation, self.config), CheckpointWithoutOutput(fp8=None)
        recomputes = self._recomputes_activation and torch.is_grad_enabled()
        weights = () if self._weighs_last else (permuted_probs,)
        activated = checkpoint.checkpoint(activate, hidden, *weights) if recomputes else None
        if activated is None:
            activated = activate(hidden, *weights)
        output = _with_adapters(linear(activated, *(layer.weight for layer in fc2)), activated, fc2, linear)
        if recomputes:
            checkpoint.discard_output_and_register_recompute(output)
        if self._weighs_last:
            output = (output * permuted_probs.unsqueeze(-1)).to(output.dtype)
        return output, None


def _with_adapters(
    output: torch.Tensor, rows: torch.Tensor, layers: Sequence[Any], linear: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Add what LoRA adapters of the experts' layers, if any, make of the rows [T, in] to the output [T, out]."""
    if not hasattr(layers[0], "lora"):
        return output
    adapters = [layer.lora for layer in layers]
    low = linear(rows, *(adapter.whole_a() for adapter in adapters)).split(adapters[0].rank, -1)
    of_projections = zip(*(adapter.whole_b() for adapter in adapters), strict=True)
    added = torch.cat([linear(part, *bs) for part, bs in zip(low, of_projections, strict=True)], -1)
    return output + added * adapters[0].scale


class _LastFirst(torch.nn.ModuleList):
    """Experts, registered from the last to the first, and iterated over from the first.

    Megatron fills its buffers from the last parameter on; so the first expert lies first in them.
    """

    def __init__(self, experts: torch.nn.ModuleList) -> None:
        super().__init__()
        for number in reversed(range(len(experts))):
            self.add_module(str(number), experts[number])

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self._modules[str(number)] for number in range(len(self)))


def _activation(config: Any, hidden: torch.Tensor, probs: torch.Tensor | None = None) -> torch.Tensor:
    """What Megatron's MLP does between its two linear layers: [T, 2 F] and weights [T], if any, -> [T, F]."""

    def unchanged(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None

    mlp = SimpleNamespace(
        config=config, activation_func=config.activation_func, linear_fc1=unchanged, linear_fc2=unchanged
    )
    return cast(torch.Tensor, MLP.forward(mlp, hidden, probs)[0])


class GroupedLinear(torch.autograd.Function):
    """rows [T, in] of experts, one after the other, times each expert's weight [out, in] transposed -> [T, out].

    The first of `products` computes that, the second the gradient of the rows. `counts` are the rows of each expert,
    `offsets` [experts] int32 where they end. With `fused`, gradients of weights go to their main_grad where they have
    one, as in Megatron's linear layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        products: tuple[Product, Product],
        counts: list[int],
        offsets: torch.Tensor,
        fused: bool,
        rows: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        product, ctx.of_rows = products
        ctx.counts, ctx.offsets, ctx.fused = counts, offsets, fused
        ctx.save_for_backward(rows, *weights)
        return product(rows, weights, counts, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = ctx.of_rows(grad, weights, ctx.counts, ctx.offsets) if ctx.needs_input_grad[4] else None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[5:]):
            of_weights = weight_gradients(weights, rows.split(ctx.counts), grad.split(ctx.counts), fused=ctx.fused)
        return None, None, None, None, of_rows, *of_weights


def _product(rows: torch.Tensor, weights: Weights, counts: Sequence[int], offsets: torch.Tensor) -> torch.Tensor:
    """Each group of rows [T, in] times its weight [out, in] transposed -> [T, out]; see `grouped_product`."""
    return grouped_product(rows, [weight.t() for weight in weights], counts, offsets)


def grouped_product(
    rows: torch.Tensor, matrices: Weights, counts: Sequence[int], offsets: torch.Tensor
) -> torch.Tensor:
    """Each group of rows times its matrix.

    Args:
        rows: [T, n], group after group.
        matrices: [groups][n, m], all with the same strides.
        counts: [groups] rows of each; they may be 0.
        offsets: the same as int32 ends of the groups, where the rows are.

    Returns:
        [T, m].
    """
    if not can_group(rows, matrices[0]):
        return torch.cat([group @ matrix for group, matrix in zip(rows.split(counts), matrices, strict=True)])
    return torch._grouped_mm(rows, stacked(matrices), offs=offsets)


def can_group(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether torch._grouped_mm takes them: bfloat16 on CUDA, and all sizes multiples of 16 bytes."""
    fits = rows.is_cuda and rows.dtype == matrix.dtype == torch.bfloat16
    return fits and len(rows) > 0 and not any(size % 8 for size in matrix.shape)


def stacked(matrices: Weights) -> torch.Tensor:
    """[groups][n, m] as [groups, n, m]: a view where they lie at equal distances in one storage, else a copy."""
    first, *rest = matrices
    places = [matrix.storage_offset() for matrix in matrices]
    distance = places[1] - places[0] if rest else first.numel()
    shared = all(matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for matrix in rest)
    even = all(places[i] == places[0] + i * distance for i in range(len(places)))
    if not (shared and even and distance >= first.numel() and distance % 8 == 0):
        return (
            torch.stack([matrix.t() for matrix in matrices]).mT if first.stride(0) == 1 else torch.stack([*matrices])
        )
    return first.as_strided((len(matrices), *first.shape), (distance, *first.stride()))


def weight_gradients(weights: Weights, rows: Weights, grads: Weights, *, fused: bool) -> list[torch.Tensor | None]:
    """grad^T @ rows of each expert: returned, or added to its main_grad.

    In the second case each expert gets a tensor that means nothing: Megatron's hooks wait for one. All of them share
    their memory; none is read.
    """
    if not (fused and all(hasattr(weight, "main_grad") for weight in weights)):
        return [grad.t() @ group for grad, group in zip(grads, rows, strict=True)]
    unread = torch.empty_like(weights[0])
    for weight, grad, group in zip(weights, grads, rows, strict=True):
        if len(group):
            add_weight_gradient(group, grad, weight.main_grad)
        weight.grad_added_to_main_grad = True
    return [unread.view_as(weight) for weight in weights]
