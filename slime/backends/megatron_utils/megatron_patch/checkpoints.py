"""Read and write torch_dist checkpoints as data, in this process, and in its background."""

from __future__ import annotations

import concurrent.futures as cf
import io
import pickle
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime.checkpoints.paths import Entry, check_names, entries_of, read_metadata
from slime.checkpoints.rollout_files import reason_of
from slime.training.resume import holds
from slime.utils.errors import UsageError


def read_data_alone() -> None:
    """Read torch_dist checkpoints as data: nothing that a file names is run.

    torch (2.13) unpickles .metadata, and with weights_only=False the objects between the tensors (random states, extra
    states of layers); Megatron reads with both. It can go when torch reads them with weights_only.
    """
    from megatron.core.msc_utils import MultiStorageClientFeature
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.metadata import StorageMeta

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the metadata of a checkpoint as plain data; all its ranks share one file."""
        metadata = read_metadata(Path(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        """Load an object between the tensors, if it is plain data."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"{name} holds more than tensors and plain data, and loading that runs code: do not trust this "
                f"checkpoint ({reason_of(error)})."
            ) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    # Where that package is installed, Megatron would read local files by it, and with a reader of its own.
    MultiStorageClientFeature.disable()
    FileSystemReader.read_metadata = read
    DefaultLoadPlanner.load_bytes = load_bytes


@contextmanager
def loading(directory: Path) -> Iterator[None]:
    """Load from a checkpoint directory inside the block; every rank enters it.

    Raises:
        UsageError: it holds what would be run; names the file, or the directory and the object, and the class.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{directory / 'common.pt'} holds more than tensors and plain data, and loading that runs code: do not "
            f"trust this checkpoint ({reason_of(error)})."
        ) from error
    except CheckpointException as error:
        check_names(directory)  # of a .metadata that was refused, torch leaves the text alone
        # every rank has the errors of all
        refusals = [found for found, _ in error.failures.values() if isinstance(found, UsageError)]
        if not refusals:
            raise
        raise UsageError(f"{directory}: {refusals[0]}") from error


class _NoCount:
    """Stands for the queue by which a helper says that it is done."""

    def get(self) -> None:
        pass

    def task_done(self) -> None:
        pass


def write_in_process() -> None:
    """Write checkpoint shards in the process that calls save, instead of in forked helpers.

    Upstream (0.16.1): even a synchronous torch_dist save forks a writer for each file and keeps a queue manager
    process. A fork of a trainer that has gRPC and gloo threads can hang, a writer that dies leaves the save waiting
    for ever, and the manager outlives a rank that is killed. Files and their content stay the same. It can go when
    upstream has a writer without processes. With --async-save a thread writes (`BackgroundSave`).

    Of the files that rank 0 alone writes, while the others wait for it in a collective, an error is kept until all
    ranks can learn of it (full_disk).
    """
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
    """Save common.pt as upstream does, but to a Python file: torch's own writer does not report a full disk."""
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    if torch.distributed.get_rank() == 0:
        with (Path(directory) / COMMON_STATE_FNAME).open("wb") as file:
            torch.save(state, file)


class BackgroundSave:
    """A checkpoint whose files a thread writes while training goes on (--async-save).

    When the save begins, the tensors are copied to host memory: what is written is what they were then, and the host
    needs room for it. The thread writes them, by Megatron's writer, and reads back what it has written, for the
    manifest. It ends with its process.

    Args:
        request: of `dist_checkpointing.save(..., async_sharded_save=True)`.
        directory: of the checkpoint.
        is_mine: which of its files this rank writes.
    """

    def __init__(self, request: Any, directory: Path, is_mine: Callable[[Path], bool]) -> None:
        self._finalize = list(request.finalize_fns)
        write = _staged(request) if request.async_fn is not None else None  # without: this rank has nothing to write

        def run() -> dict[str, Entry]:
            if write is not None:
                write()
            return entries_of(directory, [path for path in sorted(directory.glob("*.distcp")) if is_mine(path)])

        threads = cf.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._entries = threads.submit(run)
        threads.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether the files of this rank are written."""
        return self._entries.done()

    def finish(self, deadline_s: float) -> dict[str, Entry]:
        """Wait for the files and write what describes them all (collective).

        Returns:
            the entries of this rank's files for the manifest.

        Raises:
            Exception: what writing failed with, on every rank; CheckpointException, which is none, among others.
            TimeoutError: it took too long.
        """
        cf.wait([self._entries], timeout=deadline_s)
        for action in self._finalize:  # the first one raises what any rank failed with
            action()
        return self._entries.result(timeout=deadline_s)


def _staged(request: Any) -> Callable[[], None]:
    """The writing of copies; Megatron copies what is on a device, and would write host tensors as they are by then."""
    write, (rank, live, results) = request.async_fn, request.async_fn_args
    held = {tensor.data_ptr() for *_, (_, tensors) in live for _, tensor in tensors}
    staged = []
    for path, key, (data, tensors) in request.preload_fn():
        copies = [(item, tensor.clone() if tensor.data_ptr() in held else tensor) for item, tensor in tensors]
        staged.append((path, key, (data, copies)))
    return lambda: write(rank, staged, results, **request.async_fn_kwargs)
