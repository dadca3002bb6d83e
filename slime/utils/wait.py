"""Waiting until something holds, with a deadline and an error that names what was waited for.

Every wait of this project that is not on a Ray reference or a collective goes through here. `poll` looks,
`check` notices early that looking on is pointless (a process that died, say).
"""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Awaitable, Callable
from typing import IO, Any, TypeVar

T = TypeVar("T")


class WaitTimeout(TimeoutError):
    """The deadline passed; the message is "waited <seconds> s for <what>"."""


def wait(
    what: str,
    deadline_s: float,
    poll: Callable[[], T | None],
    *,
    interval_s: float = 0.1,
    check: Callable[[], None] | None = None,
) -> T:
    """Poll until something other than None or False comes back, and return it.

    Args:
        what: as it is to appear in the error ("engine 0 to be healthy").
        deadline_s: seconds after which the wait is given up. `poll` runs at least once.
        poll: None or False means "not yet"; what it raises ends the wait.
        interval_s: pause between two polls.
        check: called before each poll; raises to end the wait early.

    Raises:
        WaitTimeout: the deadline passed.
    """
    end = time.monotonic() + deadline_s
    while True:
        if check is not None:
            check()
        found = poll()
        if found is not None and found is not False:
            return found
        time.sleep(_pause(what, deadline_s, end, interval_s))


async def wait_async(
    what: str,
    deadline_s: float,
    poll: Callable[[], Awaitable[T | None]],
    *,
    interval_s: float = 0.1,
    check: Callable[[], None] | None = None,
) -> T:
    """`wait` for a coroutine function as `poll`; other tasks of the loop go on meanwhile."""
    end = time.monotonic() + deadline_s
    while True:
        if check is not None:
            check()
        found = await poll()
        if found is not None and found is not False:
            return found
        await asyncio.sleep(_pause(what, deadline_s, end, interval_s))


def lock_file(file: IO[Any], what: str, deadline_s: float, *, shared: bool = False) -> None:
    """Lock a file for this process, waiting for whoever has it; closing the file gives it back.

    Args:
        file: open.
        what: whose turn is waited for, as it is to appear in the error.
        deadline_s: seconds after which the wait is given up.
        shared: with others that want it shared, too.

    Raises:
        WaitTimeout: another process had it until the deadline.
        OSError: the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX

    def is_mine() -> bool:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    wait(what, deadline_s, is_mine, interval_s=0.02)


def _pause(what: str, deadline_s: float, end: float, interval_s: float) -> float:
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise WaitTimeout(f"waited {deadline_s:g} s for {what}")
    return min(interval_s, left_s)
