"""How ranks write a checkpoint together: at once or in the background, and with one end on all ranks.

1. A checkpoint that does not fit on its disk is given up, on every rank, and what was written of it is removed. A run
   can go on without it: the one before is still there. Whether it fits is asked before anything is written; what shows
   only then (a quota, another writer) is recognised by the error. Often one rank alone has it, for most small files
   are rank 0's: it must not leave the others waiting, so all ranks learn of it at the end of a block (`together`).
2. With --async-save a thread writes a rank's part while training goes on. When the save begins, the tensors are copied
   to host memory: what is written is what they were then, and the host needs room for it. The thread writes them
   (Megatron's writer, without its forked helpers: megatron_patch/checkpoint_writer) and reads back what it has
   written, for the manifest. It ends with its process.

What a checkpoint is made of, and when it is complete, is decided in `iterations`.
"""

from __future__ import annotations

import concurrent.futures as cf
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from slime.utils.distributed_utils import barrier, gathered
from slime.utils.full_disk import line_of_full_disk, said
from slime.utils.manifest import Entry, entries_of

MARGIN = 64 * 2**20
"""Bytes for the small files of a checkpoint."""


class DiskFull(RuntimeError):
    """A checkpoint was not written, for want of room; the message says where and how much."""


class _Blocks:
    """The `together` blocks that this process is in, the innermost last: what failed inside and was not raised yet."""

    open: list[list[BaseException]] = []


@contextmanager
def together(what: str) -> Iterator[None]:
    """What fails on one rank inside the block is raised on every rank, at its end; every rank enters it.

    A rank leaves the block at its error. So where the ranks wait for each other inside it, what can fail on one of
    them alone before that has to be held (`holds`), or be in a block of its own.

    Args:
        what: as of `barrier`.

    Raises:
        RuntimeError: it failed on another rank. Where it failed the error itself is raised.
        WaitTimeout: a rank does not come to the end of the block.
    """
    failed: list[BaseException] = []
    _Blocks.open.append(failed)
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        failed.append(error)
    finally:
        _Blocks.open.pop()
    barrier(what)
    of_ranks = gathered(f"{type(failed[0]).__name__}: {said(failed[0])}" if failed else None)
    if failed:
        raise failed[0]
    for rank, problem in enumerate(of_ranks):
        if problem is not None:
            raise RuntimeError(f"rank {rank}: {problem}")


def holds(write: Callable[..., Any]) -> Callable[..., None]:
    """A write for which other ranks wait right after it: what it fails with is raised at the end of the block that it
    is called in, and outside of one at once."""

    @functools.wraps(write)
    def held(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:
            if not _Blocks.open:
                raise
            _Blocks.open[-1].append(error)

    return held


@contextmanager
def gives_way_to_a_full_disk(directory: Path, *, needed: int | None) -> Iterator[None]:
    """Write a checkpoint to `directory` inside the block, which is one as of `together`; every rank enters it.

    Args:
        directory: exists where `needed` is given; removed where the block gives up.
        needed: bytes that this rank will write; None where they are written, or being written, already.

    Raises:
        DiskFull: it does not fit, or did not on some rank. Other errors pass.
    """
    wanted, free = 0, 1
    if needed is not None:
        wanted, free = sum(gathered(needed)) + MARGIN, gathered(shutil.disk_usage(directory).free)[0]
    if wanted > free:
        _remove(directory)
        raise DiskFull(f"{directory.parent} has {free / 1e9:.2f} GB free, and it takes {wanted / 1e9:.2f} GB")
    try:
        with together(f"the checkpoint {directory}"):
            yield
    except (Exception, CheckpointException) as error:
        # Of all ranks: torch says on rank 0 alone what another one failed with.
        problem = next(filter(None, gathered(line_of_full_disk(error))), None)
        if problem is None:
            raise
        _remove(directory)
        raise DiskFull(f"{directory.parent} became full: {problem[-200:]}") from error


def _remove(directory: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    gathered(None)  # gone on every rank


class BackgroundSave:
    """What is being written.

    Args:
        request: of `dist_checkpointing.save(..., async_sharded_save=True)`.
        directory: of the checkpoint.
        is_mine: which of its files this rank writes.
    """

    def __init__(self, request: AsyncRequest, directory: Path, is_mine: Callable[[Path], bool]) -> None:
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
        """Whether `finish` has nothing to wait for on this rank."""
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


def _staged(request: AsyncRequest) -> Callable[[], None]:
    """The writing of copies; Megatron copies what is on a device, and would write host tensors as they are by then."""
    write, (rank, live, results) = request.async_fn, request.async_fn_args
    held = {tensor.data_ptr() for *_, (_, tensors) in live for _, tensor in tensors}
    staged = []
    for path, key, (data, tensors) in request.preload_fn():
        copies = [(item, tensor.clone() if tensor.data_ptr() in held else tensor) for item, tensor in tensors]
        staged.append((path, key, (data, copies)))
    return lambda: write(rank, staged, results, **request.async_fn_kwargs)


def merged(entries: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """Entries of several ranks as one."""
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}
