"""Have every rank of the trainer learn of an error that one of them has (collective)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.engines import NoLinkError, WeightSyncError
from slime.utils.distributed_utils import gathered

T = TypeVar("T")


def from_source(error: WeightSyncError | None, *, version: int, deadline_s: float) -> WeightSyncError | None:
    """Return the source rank's error on every rank; a rank's own one comes first.

    Args:
        error: of this rank.
        version: of the sync, for messages.
        deadline_s: of the process group, for messages.

    Raises:
        WeightSyncError: the source rank did not come here in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return error
    from slime.utils.distributed_utils import get_gloo_group

    held = [error]
    try:
        dist.broadcast_object_list(held, src=0, group=get_gloo_group())
    except RuntimeError as late:
        if "Timed out" not in str(late):  # the source is gone, which is reported by its own error
            raise
        raise WeightSyncError(
            f"weight sync {version}: rank {dist.get_rank()} waited {deadline_s:.0f} s for rank 0"
            ", which hands the weights to the engines; if that takes longer, raise --distributed-timeout-minutes",
            is_final=True,
        ) from late
    return error or held[0]


def together(action: Callable[[], T]) -> T:
    """Do something on every rank; where a group cannot be formed on one, every rank raises its NoLinkError."""
    result, error = None, None
    try:
        result = action()
    except NoLinkError as failed:
        error = failed
    if (first := next(filter(None, gathered(error)), None)) is not None:
        raise first
    return cast(T, result)
