"""A checkpoint that does not fit on its disk is given up, on every rank, and what was written of it is removed.

A run can go on without it: the one before is still there. Whether it fits is asked before anything is written, for
ranks that fail one by one while they write would wait for each other; what shows only then (a quota, another writer)
is recognised by the error. It knows nothing of what is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slime.utils.distributed_utils import gathered

WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
MARGIN = 64 * 2**20
"""Bytes for the small files of a checkpoint."""


class DiskFull(RuntimeError):
    """A checkpoint was not written, for want of room; the message says where and how much."""


@contextmanager
def gives_way_to_a_full_disk(directory: Path, *, needed: int | None) -> Iterator[None]:
    """Write a checkpoint to `directory` inside the block; every rank enters it.

    Args:
        directory: exists; removed where the block gives up.
        needed: bytes that this rank will write; None where they are written, or being written, already.

    Raises:
        DiskFull: it does not fit. Other errors pass.
    """
    wanted, free = 0, 1
    if needed is not None:
        wanted, free = sum(gathered(needed)) + MARGIN, gathered(shutil.disk_usage(directory).free)[0]
    if wanted > free:
        _remove(directory)
        raise DiskFull(f"{directory.parent} has {free / 1e9:.2f} GB free, and it takes {wanted / 1e9:.2f} GB")
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if not any(gathered(is_of_full_disk(error))):
            raise
        _remove(directory)
        raise DiskFull(f"{directory.parent} became full: {_said(error)[:200]}") from error


def is_of_full_disk(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that a disk is full."""
    return any(word in _said(error) for word in WORDS)


def _said(error: BaseException) -> str:
    behind = error.__cause__ or error.__context__
    return f"{error} {_said(behind) if behind else ''}"


def _remove(directory: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    gathered(None)  # gone on every rank
