"""Gather and reduce-scatter shares of different sizes over gloo, as experts with tensor parallelism exchange them.

Upstream (0.16.1): `mappings` hands torch lists of tensors of different lengths, which NCCL takes and gloo does not. On
the CPU shares are padded to the longest before they are gathered, and the whole is summed where it would be scattered.
It can go when gloo takes them. It is applied on the CPU alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def apply() -> None:
    """Replace the two functions where sizes are given; does nothing the second time."""
    import megatron.core.tensor_parallel.mappings as mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if gather.__module__ == __name__:
        return

    def gather_rows(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        """[rows of this rank, ...] -> [rows of all ranks, ...]."""
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = list(output_split_sizes)
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_rows(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        """[rows of all ranks, ...] -> the sum over ranks of this rank's rows."""
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_rows, scatter_rows
