"""A directory that grows under another name until all of it is on the disk, and goes on growing after a cut.

What it is made from, and what is to be in it, is its plan, whose checksum lies in it: a directory of another plan
starts over. It knows no format of what is written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.manifest import to_disk

logger = logging.getLogger(__name__)

PLAN_FILE = "conversion_plan.json"
VERSION = 1
"""Of the converters: one more whenever the same plan comes to make other bytes; nothing older is gone on with."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems say that have no locks; a conversion does without there."""


@contextmanager
def growing_alone(partial: Path, final: Path, *, replaces: bool) -> Iterator[None]:
    """Keep other processes away from a directory while it grows, by a lock on a file beside it, which goes at the end.

    The system lets go of the lock of a process that is killed; the file that stays then means nothing.

    Args:
        partial: the directory's name until it is complete.
        final: its name from then on.
        replaces: whether what has that name goes.

    Raises:
        UsageError: another process has the lock, or has given a directory the final name since that was looked at.
        OSError: the file cannot be made.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    file = lock_of(partial)
    handle = _locked(file, partial)
    try:
        if os.path.lexists(final) and not replaces and not lacks_its_end(final):
            raise UsageError(f"{final} came into being meanwhile; remove it, or name another directory.")
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock goes, so that nobody has it on a file without a name
        os.close(handle)


def lacks_its_end(final: Path) -> bool:
    """Whether a conversion was cut between giving a directory its name and removing its plan."""
    return (final / PLAN_FILE).is_file()


def take_back(partial: Path, final: Path, plan: Any, *, replaces: bool) -> None:
    """Where a conversion of this plan was cut after its directory had got its name, have it grow again, for its end.

    Args:
        partial, final, replaces: as for `growing_alone`.
        plan: as for `open_partial`.

    Raises:
        UsageError: it was one of another plan, and is not to be replaced.
        OSError: the directory cannot be renamed.
    """
    if not lacks_its_end(final):
        return
    if (final / PLAN_FILE).read_text() == _digest(plan) and not os.path.lexists(partial):
        final.rename(partial)
    elif not replaces:
        raise UsageError(f"{final} exists, made by another conversion; remove it, or name another directory.")


def _digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps([VERSION, plan]).encode()).hexdigest()


def lock_of(partial: Path) -> Path:
    """The file whose lock is held while the directory grows."""
    return partial.with_name(f"{partial.name}.lock")


def _locked(file: Path, partial: Path) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with_name = file.stat().st_ino if file.exists() else None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning("the disk of %s has no locks: see to it that nobody else writes there", partial)
                return handle
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise UsageError(
                    f"another process is writing {partial} now; wait for its end, or name another directory."
                ) from error
            if isinstance(error, FileNotFoundError):
                continue
            raise
        if with_name == os.fstat(handle).st_ino:
            return handle
        os.close(handle)  # whoever had the lock has removed the file since it was opened


def open_partial(partial: Path, plan: Any) -> None:
    """Make the directory, or keep one of the same plan with what is in it.

    Args:
        partial: its name until it is complete.
        plan: JSON of all that decides what is in it.

    Raises:
        UsageError: there is one of that name that no conversion made, or a link.
        OSError: it cannot be made.
    """
    if partial.is_symlink():
        raise UsageError(f"{partial}, where it grows, is a link; remove it, or name another directory.")
    digest, file = _digest(plan), partial / PLAN_FILE
    if file.is_file() and file.read_text() == digest:
        return
    if partial.exists() and not file.is_file() and (not partial.is_dir() or any(partial.iterdir())):
        raise UsageError(f"{partial} exists and is of no conversion, which would grow there; move or remove it.")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    file.write_text(digest)


def close_partial(partial: Path, final: Path, *, replaces: bool) -> None:
    """Give the finished directory its name; its plan goes last, so that a cut before leaves what can be gone on with.

    Raises:
        UsageError: something has the name, and it is not to be replaced.
        OSError: it cannot be; whatever had the name still has it.
    """
    put_in_place(partial, final, replaces=replaces)
    (final / PLAN_FILE).unlink()


def old_of(final: Path) -> Path:
    """The name that what is replaced has until the new one has its name."""
    return final.with_name(f".{final.name}.old")


def put_in_place(partial: Path, final: Path, *, replaces: bool) -> None:
    """Rename a finished directory; one of the same name is deleted after that, if it may be.

    Args:
        partial: the finished one.
        final: its name.
        replaces: whether what has that name goes.

    Raises:
        UsageError: something has the name, and it is not to be replaced.
        OSError: it cannot be; whatever had the name still has it.
    """
    old = old_of(final)
    if replaces:
        _remove(old)
        if os.path.lexists(final):
            final.rename(old)
    elif os.path.lexists(final):
        raise UsageError(
            f"{final} came into being meanwhile and is left as it is; the complete result is in {partial}. Move "
            f"{final} away and run the same command again, which then only gives the result its name."
        )
    try:
        partial.rename(final)
        to_disk(final.parent)
    except OSError:
        if not partial.exists():
            final.rename(partial)
        if replaces and os.path.lexists(old):
            old.rename(final)
        raise
    if replaces:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_room(directory: Path, num_bytes: int, flag: str) -> None:
    """Raise UsageError where the disk of an existing directory has no room for so many bytes more."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UsageError(
            f"{flag}: {num_bytes / 1e9:.2f} GB are still to be written to {directory}, where {free / 1e9:.2f} GB are "
            "free; make room, or name a directory on another disk."
        )


def said_of_disk(error: OSError, directory: Path) -> Exception:
    """What to raise for an error of the system: a sentence where the disk is full, else the error itself."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return UsageError(
        f"the disk of {directory} is full; make room and run the same command again, it goes on from what is complete."
    )
