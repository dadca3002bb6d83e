"""Receive a bucket of weights in one broadcast, straight into the memory from which it is loaded.

For load format "flattened_bucket" of `/update_weights_from_distributed` SGLang allocates every tensor, concatenates
them to have a buffer to receive into, and loads the parts of that one by one: twice the bucket's memory, and a copy of
it that holds nothing yet. Here the buffer is allocated alone, and a bucket that is known is loaded as one out of
shared memory is (`quick_load`). What is asked and what is broadcast stay the same, so a sender need not know.

SGLang gives what was received to the model alone; here an engine that drafts with a model of its own gives it that
bucket, too, as it does with one out of shared memory.

A bucket of nothing is a broadcast of one byte, to see that the group works.

With CUDA nothing here waits for the device: the server answers as soon as receiving and copying are queued. `install`
changes the server that runs in this process; it does not know senders or models.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

FAILED = "The bucket could not be received or loaded, so that the weights are neither the old nor the new ones"


def install() -> None:
    """Replace SGLang's way in this process; imports SGLang."""
    from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater._update_bucketed_weights_from_distributed = _receive
    manager = of_scheduler.SchedulerWeightUpdaterManager
    update = manager.update_weights_from_distributed

    def update_both(self: Any, request: Any) -> Any:
        runner = of_scheduler._get_draft_model_runner(self.draft_worker) if self.draft_worker is not None else None
        with _also_given_to(None if runner is None else runner.weight_updater):
            return update(self, request)

    manager.update_weights_from_distributed = update_both


_drafts: list[Any] = []
"""Updaters of the models with which this engine drafts, while it receives."""


@contextlib.contextmanager
def _also_given_to(draft: Any) -> Iterator[None]:
    """Have buckets that are received meanwhile loaded by the updater of a drafting model, too, if there is one."""
    _drafts[:] = [] if draft is None else [draft]
    try:
        yield
    finally:
        _drafts.clear()


def _receive(
    updater: Any, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group_name: str
) -> tuple[bool, str]:
    """As SGLang's method: whether it worked, and what to answer."""
    try:
        if not names:
            return _try(updater, group_name)
        num_bytes, metadata = layout_of(tuple(names), tuple(map(str, dtypes)), tuple(map(tuple, shapes)))
        data = torch.empty(num_bytes, dtype=torch.uint8, device=updater.device)
        torch.distributed.broadcast(data, src=0, group=updater._model_update_group[group_name])
        bucket = {"flattened_tensor": data, "metadata": metadata}
        for taker in (*(draft for draft in _drafts if draft is not updater), updater):
            taker._update_weights_from_flattened_bucket(bucket)
    except Exception as error:  # the server has to answer, and to go on
        logger.exception(FAILED)
        return False, f"{FAILED}: {type(error).__name__}: {error}"
    return True, "Succeeded to update parameter online."


def _try(updater: Any, group_name: str) -> tuple[bool, str]:
    """A broadcast of one byte, waited for: communicators are made in the first one, and fail in it."""
    data = torch.zeros(1, dtype=torch.uint8, device=updater.device)
    torch.distributed.broadcast(data, src=0, group=updater._model_update_group[group_name])
    return data.item() == 1, "received one byte"


@functools.lru_cache(maxsize=4096)
def layout_of(
    names: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, list[Any]]:
    """How many bytes a bucket has, and SGLang's description of what lies where: one tensor right behind the other."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    kinds = [getattr(torch, name.removeprefix("torch.")) for name in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
    starts = list(itertools.accumulate(sizes, initial=0))
    metadata = [
        FlattenedTensorMetadata(name=name, shape=shape, dtype=kind, start_idx=start, end_idx=start + size, numel=size)
        for name, shape, kind, start, size in zip(names, shapes, kinds, starts[:-1], sizes, strict=True)
    ]
    return starts[-1], metadata
