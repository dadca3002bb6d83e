"""Tensor-parallel regions of one rank without autograd functions that do nothing.

Upstream (0.16.1): every linear layer copies into, or reduces from, the region of its tensor-parallel group. With one
rank both give back what they got, at the host's price of an autograd function forward and back: four in each layer. It
can go when Megatron leaves them out itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[..., torch.Tensor]


def apply() -> None:
    """Have linear layers skip both in groups of one rank; does nothing the second time."""
    import megatron.core.tensor_parallel.layers as layers

    if layers.copy_to_tensor_model_parallel_region.__module__ == __name__:
        return
    layers.copy_to_tensor_model_parallel_region = _unless_single_rank(layers.copy_to_tensor_model_parallel_region)
    layers.reduce_from_tensor_model_parallel_region = _unless_single_rank(
        layers.reduce_from_tensor_model_parallel_region
    )


def _unless_single_rank(change: Change) -> Change:
    def changed(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else change(input_, group=group)

    return changed
