"""What Megatron does for one rank as for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def smallest() -> Any:
    """The options of an NCCL group with one channel."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def use_small_groups() -> None:
    """Give process groups of one rank the smallest NCCL communicator.

    Upstream (0.16.1): every group gets NCCL's default options, with which a communicator is made ready for 32
    channels, whether there is another rank to talk to or not. A trainer on one GPU has about ten such groups, and each
    that was used holds 0.54 GB (NCCL 2.28 on an H200; with one channel 9 MB). It can go when NCCL takes no buffers for
    a lone rank.
    """
    import megatron.core.parallel_state as parallel_state

    create = parallel_state.create_group

    def create_group(
        ranks: list[int], timeout: Any = None, backend: str | None = None, pg_options: Any = None, **more: Any
    ) -> Any:
        if len(ranks) == 1 and pg_options is None and backend in (None, "nccl"):
            pg_options = smallest()
        return create(ranks, timeout, backend, pg_options, **more)

    parallel_state.create_group = create_group


Change = Callable[..., torch.Tensor]


def skip_regions() -> None:
    """Leave out the autograd functions of a tensor-parallel region of one rank, which do nothing.

    Upstream (0.16.1): every linear layer copies into, or reduces from, the region of its tensor-parallel group. With
    one rank both give back what they got, at the host's price of an autograd function forward and back: four in each
    layer. It can go when Megatron leaves them out itself.
    """
    import megatron.core.tensor_parallel.layers as layers

    layers.copy_to_tensor_model_parallel_region = _unless_single_rank(layers.copy_to_tensor_model_parallel_region)
    layers.reduce_from_tensor_model_parallel_region = _unless_single_rank(
        layers.reduce_from_tensor_model_parallel_region
    )


def _unless_single_rank(change: Change) -> Change:
    def changed(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else change(input_, group=group)

    return changed
