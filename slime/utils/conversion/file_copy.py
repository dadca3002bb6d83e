"""Copy ranges of bytes from file to file inside the kernel: for tensors whose bytes are the same in both forms.

Nothing of them passes through this process's memory, unless somebody wants to see them on the way. Which bytes of a
tensor are those of another one is found on tensors without memory: a part that is a contiguous view of a whole is a
range of its bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.utils.errors import UsageError

_PIECE = 16 * 1024**2
_SHOWN_PIECE = 1024**2  # stays in the processor's cache between reading, hashing and writing
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@dataclass(frozen=True)
class Segment:
    """`num_bytes` of a file, from `offset` on."""

    path: Path
    offset: int
    num_bytes: int

    def cut(self, start: int, stop: int) -> Segment:
        """The bytes [start, stop) of it."""
        return Segment(self.path, self.offset + start, stop - start)


def range_in(part: torch.Tensor, whole: torch.Tensor) -> tuple[int, int] | None:
    """The bytes of `whole` that `part` is, if it is a contiguous view of it; both may be without memory."""
    is_view = part.untyped_storage()._cdata == whole.untyped_storage()._cdata and part.dtype == whole.dtype
    if not is_view or not part.is_contiguous() or not whole.is_contiguous():
        return None
    start = (part.storage_offset() - whole.storage_offset()) * part.itemsize
    return start, start + part.numel() * part.itemsize


def tiles(ranges: Sequence[tuple[int, int, Segment]], start: int, stop: int) -> list[Segment] | None:
    """The segments that make up [start, stop), each given with the range that it is; None where there is a gap."""
    found: list[Segment] = []
    at = start
    for first, behind, segment in sorted(ranges, key=lambda one: one[0]):
        if first <= at < behind and at < stop:
            end = min(behind, stop)
            found.append(segment.cut(at - first, end - first))
            at = end
    return found if at == stop else None


def copy_into(
    segments: Sequence[Segment], handle: int, offset: int, *, update: Callable[[bytes], Any] | None = None
) -> int:
    """Write segments one after the other into an open file, from `offset` on; returns where they end.

    Args:
        segments: to copy.
        handle: of the file.
        offset: in it.
        update: is given every byte in order as it is written, which then passes through this process.

    Raises:
        UsageError: a file ends before.
    """
    for segment in segments:
        source = os.open(segment.path, os.O_RDONLY)
        try:
            done = 0
            while done < segment.num_bytes:
                place = source, segment.offset + done, handle, offset + done, segment.num_bytes - done
                count = _copy_some(*place) if update is None else _copy_through(*place, update)
                if not count:
                    raise UsageError(f"{segment.path} is cut off; download or write it again.")
                done += count
        finally:
            os.close(source)
        offset += segment.num_bytes
    return offset


def _copy_through(
    source: int, start: int, handle: int, offset: int, num_bytes: int, update: Callable[[bytes], Any]
) -> int:
    """Copy some bytes and show them; returns how many."""
    data = os.pread(source, min(num_bytes, _SHOWN_PIECE), start)
    update(data)
    done = 0
    while done < len(data):
        done += os.pwrite(handle, memoryview(data)[done:], offset + done)
    return done


def _copy_some(source: int, start: int, handle: int, offset: int, num_bytes: int) -> int:
    """Copy some bytes, in the kernel where the file systems can; returns how many."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, handle, num_bytes, start, offset)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
    return os.pwrite(handle, os.pread(source, min(num_bytes, _PIECE), start), offset)
