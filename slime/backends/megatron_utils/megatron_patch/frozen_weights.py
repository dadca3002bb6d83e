"""Biases that are trained although the weight of their linear layer is frozen.

Upstream (0.16.1): a column-parallel layer with a frozen weight adds its bias inside an autograd function that returns
no gradient for it, so the bias stays as it is. It can go when that function returns one.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Add the gradient of the bias; does nothing the second time."""
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    of_input_alone = LinearWithFrozenWeight.backward
    if of_input_alone.__module__ == __name__:
        return

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_input, of_weight, _, *others = of_input_alone(ctx, grad_output)
        of_bias = grad_output.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, *others

    LinearWithFrozenWeight.backward = staticmethod(backward)
