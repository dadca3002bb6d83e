"""Process groups of one rank with the smallest NCCL communicator.

Upstream (0.16.1): every group gets NCCL's default options, with which a communicator is made ready for 32 channels,
whether there is another rank to talk to or not. A trainer on one GPU has about ten such groups, and each that was used
holds 0.54 GB (NCCL 2.28 on an H200; with one channel 9 MB). It can go when NCCL takes no buffers for a lone rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def smallest() -> Any:
    """The options of an NCCL group with one channel."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def apply() -> None:
    """Have Megatron's groups made so, unless they have options already; does nothing the second time."""
    import megatron.core.parallel_state as parallel_state

    create = parallel_state.create_group
    if create.__module__ == __name__:
        return

    def create_group(
        ranks: list[int], timeout: Any = None, backend: str | None = None, pg_options: Any = None, **more: Any
    ) -> Any:
        if len(ranks) == 1 and pg_options is None and backend in (None, "nccl"):
            pg_options = smallest()
        return create(ranks, timeout, backend, pg_options, **more)

    parallel_state.create_group = create_group
