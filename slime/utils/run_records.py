"""Records of the runs of this user on this host, for the case that a driver and its sweeper are killed together.

A record is a file that names what a run holds. The driver and its sweeper keep it locked; the kernel gives the lock
back when the last of them has ended, so whoever can take the lock knows that the run is dead. (Process numbers would
not do: containers may share /tmp, and each has numbers of its own.) The sweeper removes the record of the run that it
has swept; the user's next run sweeps what other records name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from slime.utils.private_files import make_own_directory

logger = logging.getLogger(__name__)

RAY_PREFIX = "slime-ray-"
"""How the name of a folder begins that holds the Ray of a run and nothing else; a sweep removes no other folder."""
_SUFFIX = ".jsonl"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Record:
    """What a record says.

    Attributes:
        run: mark of the run.
        output_dir: of the run.
        ray: folder of the Ray that it had started.
        memory: its shared memory, path -> inode: a file of the same name may be somebody else's later.
    """

    run: str
    output_dir: Path | None = None
    ray: Path | None = None
    memory: dict[Path, int] = field(default_factory=dict)

    def memory_left(self) -> list[Path]:
        """Return what is left of its shared memory."""
        return [path for path, inode in self.memory.items() if _inode(path) == inode]


def directory() -> Path:
    """Return the directory of this user's records since this kernel has started, which nobody else can write to.

    A lock says nothing about a process under another kernel, which may see the same files: another host, a sandbox.

    Raises:
        OSError: there is no such directory, and it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"slime-runs-{os.getuid()}-{_BOOT.read_text()[:8]}"
    make_own_directory(path)
    return path


def begin_record(run: str, output_dir: Path) -> IO[str] | None:
    """Write the record of a run that begins; the run lives for as long as a process has the file open.

    Returns:
        the locked file; None where none can be made (no room, no locks), which costs only what it is for.
    """
    try:
        folder = directory()
        file = (folder / f".{run}").open("x")  # another run must not find it before it is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / f".{run}", path_of(run))
        note(run, "output_dir", output_dir)
    except OSError as error:
        logger.debug("there is no record of this run: %s", error)
        return None
    return file


def path_of(run: str) -> Path:
    """Return where the record of a run is."""
    return directory() / f"{run}{_SUFFIX}"


def note(run: str, kind: str, path: Path) -> None:
    """Add something to the record of a run, if it has one."""
    with contextlib.suppress(OSError), path_of(run).open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write(json.dumps([kind, str(path), _inode(path)]) + "\n")


def _inode(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return None


def remove_record(run: str) -> None:
    """Forget a run of which nothing is left."""
    with contextlib.suppress(OSError):
        path_of(run).unlink()


def dead_runs() -> Iterator[Record]:
    """Yield the records of runs of which neither driver nor sweeper lives, and remove each after it was handled."""
    try:
        paths = sorted(directory().glob(f"*{_SUFFIX}"))
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open(errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield _read(path.name.removesuffix(_SUFFIX), file)
            path.unlink()


def live_output_dirs() -> list[Path]:
    """Return the output directories of this user's runs on this host of which driver or sweeper lives."""
    found = []
    with contextlib.suppress(OSError):
        for path in directory().glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError), path.open(errors="replace") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(_read(path.name.removesuffix(_SUFFIX), file).output_dir)
    return [path for path in found if path is not None]


def _read(run: str, file: IO[str]) -> Record:
    record = Record(run)
    for line in file:
        with contextlib.suppress(ValueError, TypeError):  # half a line: its writer was killed
            kind, path, inode = json.loads(line)
            if kind == "memory":
                record.memory[Path(path)] = int(inode)
            elif kind in ("output_dir", "ray"):
                setattr(record, kind, Path(path))
    return record
