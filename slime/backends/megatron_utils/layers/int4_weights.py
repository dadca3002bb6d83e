"""Linear layers that compute with their weights rounded to an int4 engine's, and are trained straight through.

A weight W is replaced by Q(W), the bf16 (on CPU: fp32) values that slime.weights.quantization makes of it for a sync,
dequantised: output = x Q(W)^T, gradient of x = grad Q(W), gradient of W = grad^T x, as if Q were the identity. So the
policy that is trained is the one that generates, and small updates add up in the master weights until a value rounds
elsewhere. Weights are rounded at every pass; nothing is kept. Groups lie along a weight's columns, so that rows may
lie in Megatron's order, and a tensor-parallel rank rounds its share by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts, grouped_product
from slime.backends.megatron_utils.layers.rounded_linear import (
    WeightGradient,
    compute_with,
    linears_of,
    weight_gradient,
)
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.megatron.precision.int4_plan import FLAG, Int4Training
from slime.config.megatron.precision.linear_plan import OF_EXPERT
from slime.utils.errors import UsageError
from slime.weights.quantization import dequantize_groups, quantize_groups

logger = logging.getLogger(__name__)


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
    for model in models:
        for layer in unwrap(model).decoder.layers:
            number = layer.layer_number - 1  # Megatron counts from 1, over all pipeline stages
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
        """As `Rounding.gradients`."""

        def of_weight(rows: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
            return weight_gradient(grad, rows, main_grad)

        return grad @ self._rounded(weight), of_weight

    def grouped_product(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """As grouped_experts' `_product`."""
        return grouped_product(rows, [self._rounded(weight).t() for weight in weights], counts, offsets)

    def grouped_of_rows(
        self, grad: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """The gradient [T, in] of the rows of `grouped_product`, of grad [T, out]."""
        return grouped_product(grad, [self._rounded(weight) for weight in weights], counts, offsets)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        values, scales, _ = quantize_groups(weight.detach(), self.group_size)
        return dequantize_groups(values, scales, self.group_size, dtype=weight.dtype)
