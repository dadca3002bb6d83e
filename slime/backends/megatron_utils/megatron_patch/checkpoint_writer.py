"""Write checkpoint shards in the process that calls save, instead of in forked helpers.

Upstream (0.16.1): even a synchronous torch_dist save forks a writer for each file and keeps a queue manager process.
A fork of a trainer that has gRPC and gloo threads can hang, a writer that dies leaves the save waiting for ever, and
the manager outlives a rank that is killed. Files and their content stay the same. It can go when upstream has a
writer without processes. With --async-save a thread writes (checkpoint.background_save).

Of the files that rank 0 alone writes, while the others wait for it in a collective, an error is kept until all ranks
can learn of it (full_disk).
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from slime.training.resume import holds


class _NoCount:
    """Stands for the queue by which a helper says that it is done."""

    def get(self) -> None:
        pass

    def task_done(self) -> None:
        pass


def apply() -> None:
    """Replace Megatron's multi-process writer by a loop, and let no rank wait for one that could not write."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    writer = filesystem_async.FileSystemWriterAsync

    def write_in_process(
        transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any
    ) -> None:
        """Write every bucket; the results, or the first error, go into the queue as upstream's collector puts them."""
        written: dict[int, Any] = {}
        error: Exception | None = None
        for i, bucket in enumerate(write_buckets):
            results: queue.Queue[Any] = queue.Queue()
            writer.write_preloaded_data(transforms, i, bucket, results, _NoCount(), use_fsync=True)
            index, outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                error = outcome
                break
            written[index] = outcome
        global_results_queue.put(error or written)

    writer.write_preloaded_data_multiproc = staticmethod(write_in_process)
    filesystem_async._get_write_results_queue = queue.Queue
    writer.finish = holds(writer.finish)
    serialization.save_config = holds(serialization.save_config)
    common.TorchCommonSaveStrategy.save_common = holds(_save_common)


def _save_common(strategy: Any, state: Any, directory: str | Path) -> None:
    """As upstream's, through a file of Python's: torch's own does not say that a disk is full."""
    import torch
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    if torch.distributed.get_rank() == 0:
        with (Path(directory) / COMMON_STATE_FNAME).open("wb") as file:
            torch.save(state, file)
