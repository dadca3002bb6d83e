"""How ranks write files together, with one end on all ranks.

A checkpoint that does not fit on its disk is given up, on every rank, and what was written of it is removed. A run can
go on without it: the one before is still there. Whether it fits is asked before anything is written; what shows only
then (a quota, another writer) is recognised by the error. Often one rank alone has it, for most small files are rank
0's: it must not leave the others waiting, so all ranks learn of it at the end of a block (`together`).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slime.utils.distributed_utils import barrier, gathered
from slime.utils.errors import line_of_full_disk, said

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
