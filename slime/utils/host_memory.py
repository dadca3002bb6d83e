"""How much memory this host gives processes, and whether its kernel has ended one for taking too much.

Both versions of control groups are read; where neither says anything, the kernel's own counter does.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_EVENTS = ("memory.events", "memory/memory.oom_control")
_KERNEL = Path("/proc/vmstat")
# What programs write whose address space is too small; in lower case or not.
OUT_OF_ADDRESSES = (
    "MemoryError",
    "Cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "Resource temporarily unavailable",
)


def host_memory() -> int:
    """Return the bytes of memory that this machine has, or the container that this process is in may take."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        with contextlib.suppress(OSError):
            if (text := (_CGROUP / name).read_text().strip()).isdigit():
                sizes.append(int(text))
    return min(sizes)


class OutOfMemoryKills:
    """Counts the processes of this container, or host, that the kernel kills for memory from now on."""

    def __init__(self) -> None:
        self._before = _kills()

    def count(self) -> int:
        """Return how many there were; 0 where the kernel does not say."""
        now = _kills()
        return max((count - self._before.get(name, 0) for name, count in now.items()), default=0)


def _kills() -> dict[str, int]:
    """File -> its counter."""
    found = {}
    for path in (*(_CGROUP / name for name in _EVENTS), _KERNEL):
        with contextlib.suppress(OSError):
            for name, _, value in (line.partition(" ") for line in path.read_text().splitlines()):
                if name == "oom_kill":
                    found[str(path)] = int(value)
    return found


def address_limit() -> int | None:
    """Return the bytes that each process may map (`ulimit -v`); None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def killed_for_memory(kills: OutOfMemoryKills) -> str | None:
    """Return in a sentence with a remedy that a process was killed for memory since `kills` began; else None."""
    if not (count := kills.count()):
        return None
    return (
        f"out of host memory: the kernel's out-of-memory killer has ended {count} process(es) here, which has "
        f"{host_memory() / 1e9:.1f} GB; ask for less (--dry-run shows what a run takes), or give the container more"
    )


def too_few_addresses(text: str) -> str | None:
    """Return in a sentence with a remedy that a process ended for `ulimit -v`, going by what it wrote; else None."""
    limit = address_limit()
    if limit is None or not any(sign.lower() in text.lower() for sign in OUT_OF_ADDRESSES):
        return None
    return f"`ulimit -v` lets a process map {limit / 1e9:.1f} GB only; lift it: ulimit -v unlimited"
