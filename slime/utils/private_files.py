"""Files and directories of this user alone: what holds secrets, and what a process loads or connects to again.

Modes are given when a file is made, not afterwards: in between another user could open it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

# Modes of `open_new`: of files that others must not read, and that they must not write.
PRIVATE, READABLE = 0o600, 0o644


def make_own_directory(path: Path, *, forbidden: int = 0o077) -> None:
    """Make a directory that only this user can enter, or see that one which is there is as private as it has to be.

    Args:
        path: its parents must exist.
        forbidden: permissions that nobody else may have where it exists.

    Raises:
        PermissionError: somebody else owns it, others have more rights, or it is a link.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} is not a directory")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & forbidden:
        raise PermissionError(f"other users have access to {path} (mode {stat.S_IMODE(status.st_mode):04o})")


def open_new(path: Path, *, mode: int = PRIVATE) -> IO[bytes]:
    """Open a new file for writing, with this mode whatever the umask allows; an older one of the name is removed."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return path.open("wb")


def write_private(path: Path, text: str) -> None:
    """Write a text that only this user can read."""
    with open_new(path) as file:
        file.write(text.encode())


def use_private_temp_dir() -> None:
    """Have this process, and what it starts from now on, put temporary files where only this user gets to them.

    torch compiles kernels into a fixed name of the temporary directory and loads them from there, and SGLang's
    processes listen at sockets in it and unpickle what arrives. In a directory that users share, whoever makes that
    name first, or whom the umask lets write, would run code as this user. The directory stays: compiled kernels are of
    use to the next run.
    """
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        make_own_directory(parent)  # TMPDIR is private already
        return
    path = parent / f"slime-tmp-{os.getuid()}"
    try:
        make_own_directory(path)
    except PermissionError as error:
        path = Path(tempfile.mkdtemp(prefix="slime-tmp-"))
        logger.warning("%s: temporary files are in %s, and compiled kernels are not kept", error, path)
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None  # it is looked up again
