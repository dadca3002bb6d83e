"""The processes of a run on this node, found by a mark in their environment, and the shared memory that they hold.

`begin_run` puts the mark into this process's environment, from where everything that it starts inherits it: Ray,
actors, engines, their children. A process that has written over its environment (to change its title) is found as the
child of one that has not. It ends nothing, and knows nothing about Ray or engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

MARK = "SLIME_RUN_ID"
# What is removed from it are files that processes of the run had open, and what `left_by_engines` finds.
SHARED_MEMORY = Path("/dev/shm")  # nosec B108
_OF_SGLANG = "sglang_loads_*.shm"
_OF_TORCH = re.compile(r"torch_(\d+)_")


def begin_run() -> str:
    """Give this process, and what it starts from now on, the mark of a new run; returns the mark."""
    os.environ[MARK] = secrets.token_hex(8)
    return os.environ[MARK]


def processes_of(run: str) -> list[psutil.Process]:
    """The marked processes of a run and all that they started; this one only where it was started with the mark."""
    alive = {process.pid: process for process in psutil.process_iter(["ppid"])}
    children: dict[int, list[int]] = {}
    for process in alive.values():
        children.setdefault(process.info["ppid"], []).append(process.pid)
    waiting, found = [pid for pid in alive if _is_marked(pid, run)], set[int]()
    while waiting:
        if (pid := waiting.pop()) not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return [alive[pid] for pid in sorted(found)]


def _is_marked(pid: int, run: str) -> bool:
    try:
        return f"{MARK}={run}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def shared_memory_of(pids: Iterable[int], since: float) -> set[Path]:
    """Return the shared memory that these processes have open or mapped, and what torch named after them.

    People keep models and data in /dev/shm, too, which a run reads: its own memory has no directory, and is not older
    than the run.

    Args:
        pids: of the processes.
        since: when the run began, in seconds since the epoch.
    """
    wanted = set(pids)
    found = {path for pid in wanted for path in _open_files(pid) if path.parent == SHARED_MEMORY}
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            named = _OF_TORCH.match(path.name)
            if named and int(named[1]) in wanted:
                found.add(path)
    return {path for path in found if _changed_at(path) >= since}


def _changed_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_ctime
    return 0.0


def left_by_engines(since: float) -> set[Path]:
    """This user's files of SGLang's schedulers (their load; each has its own open for as long as it lives) that were
    written at `since` or later, seconds since the epoch. A scheduler that was killed before anybody had looked at it
    leaves one that nothing leads to."""
    found = set[Path]()
    for path in SHARED_MEMORY.glob(_OF_SGLANG):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                found.add(path)
    return found


def _open_files(pid: int) -> set[Path]:
    prefix, found = f"{SHARED_MEMORY}/", set[str]()
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        found |= {line[line.index(prefix) :] for line in maps.splitlines() if prefix in line}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {Path(name) for name in found if name.startswith(prefix) and not name.endswith(" (deleted)")}


def remove_unused(files: Collection[Path]) -> list[Path]:
    """Remove those of the files in /dev/shm that no process has open or mapped any more; returns them."""
    left = [path for path in files if path.parent == SHARED_MEMORY and path.exists()]
    if not left:
        return []
    used = {path for process in psutil.process_iter() for path in _open_files(process.pid)}
    removed = []
    for path in left:
        if path not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed
