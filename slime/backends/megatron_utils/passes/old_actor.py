"""The weights that generated a rollout (--keep-old-actor): a copy of each version that engines got, by its number.

A rollout says at which version it was generated (`weight_version` of its training data). When it is trained, the
trainer has moved on, and engines may have newer weights too (train_async.py); so the last versions are kept that a
rollout may still come with, and dropped when none can. Copies are tags of a TensorBackuper, in host memory. Of engines
and of when syncs happen it knows nothing: it is told each version.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from slime.config.args import Args
from slime.utils.misc import num_weight_versions
from slime.utils.tensor_backper import TensorBackuper
from slime.utils.train_data import RolloutBatch

_TAG = "old_actor/"


def keep_version(args: Args, weights: TensorBackuper, version: int) -> None:
    """Copy the model's weights, which engines have now, and drop what no rollout can come with any more.

    Args:
        args: `async_buffer_size` and `update_weights_interval` say how many versions that leaves.
        weights: of the model.
        version: number of the weight sync.
    """
    _drop_before(weights, version + 1 - num_weight_versions(args.async_buffer_size, args.update_weights_interval))
    weights.backup(f"{_TAG}{version}")


def swapped_old_actor(weights: TensorBackuper, rollout_data: RolloutBatch) -> AbstractContextManager[None]:
    """The model holds the weights that generated this rollout inside the block; older copies are dropped for good.

    Rollouts are trained in the order in which they were generated, so no later one needs those. A rollout of no known
    version (nothing was synced: --debug-train-only) leaves the model as it is.
    """
    version = rollout_data.get("weight_version")
    if version is None:
        return nullcontext()
    _drop_before(weights, version)
    return weights.swapped(f"{_TAG}{version}")


def _drop_before(weights: TensorBackuper, version: int) -> None:
    for tag in weights.tags:
        if tag.startswith(_TAG) and int(tag.removeprefix(_TAG)) < version:
            weights.drop(tag)
