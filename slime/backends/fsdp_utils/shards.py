"""A rank's part of a sharded tensor, and back."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, live."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter (a live view), and the number of the first."""
    if not isinstance(parameter, DTensor):
        return parameter.data, 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    first = min(rows * mesh.get_local_rank(mesh.ndim - 1), parameter.shape[0])
    return parameter.to_local().data, first


def sharded_as(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A shard (live) as part of a tensor that is sharded as a parameter is."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
