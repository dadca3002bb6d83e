"""How a rank's share of a rollout gets to it: through Ray's object store, or over NIXL.

With NIXL (--rollout-data-transport nixl) the columns of one value per token stay in the memory of the rollout manager,
where each trainer reads them (RDMA, where the network has it); the rest goes with the reference. It does not know what
the columns mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ray

from slime.utils.columns import FlatColumn, flatten_columns
from slime.utils.misc import Box


def put_share(share: Mapping[str, Any], transport: str) -> Box:
    """Make a share available to trainers, which `slime.utils.data.process_rollout_data` fetches.

    Args:
        share: columns of a rank.
        transport: of --rollout-data-transport.
    """
    columns = flatten_columns(share)
    if transport == "nixl":
        return Box(ray.put({name: _as_tensor(column) for name, column in columns.items()}, _tensor_transport="nixl"))
    return Box(ray.put(columns))


def _as_tensor(column: Any) -> Any:
    """NIXL carries tensors alone; one without elements has no memory to read."""
    if not isinstance(column, FlatColumn) or not column.values.size:
        return column
    import torch

    return dataclasses.replace(column, values=torch.from_numpy(column.values))
