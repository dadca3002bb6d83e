"""Waiting until something holds, with a deadline and an error that names what was waited for; and daemon threads.

Every wait of this project that is not on a Ray reference or a collective goes through here. `poll` looks,
`check` notices early that looking on is pointless (a process that died, say).

Daemon threads run blocking functions, each kind in threads of its own, so that one that hangs holds up no other, and
watches that look at something again and again. `asyncio.to_thread` puts everything into one pool, whose threads the
interpreter waits for when it ends.

Wait graph: `DaemonThreads.run` waits for a thread, as long as calls that came before take, then for the function, for
`timeout_s`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import contextlib
import contextvars
import fcntl
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_IDLE_S = 60.0


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


class Watch:
    """A daemon thread that looks at something again and again until `stop`.

    Args:
        name: of the thread.
        every_s: seconds between two looks.
    """

    def __init__(self, name: str, *, every_s: float) -> None:
        self.every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a look that is under way goes on."""
        self._is_over.set()

    def tick(self) -> None:
        """Look once."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._is_over.wait(self.every_s):
            self._try(self.tick)

    def _try(self, look: Callable[[], Any]) -> None:
        """Look, and go on when that fails: a watch that ended would leave what it looks at unwatched."""
        try_and_log(f"a look of the {self._thread.name}", look, level=logging.ERROR, with_traceback=True)


def try_and_log(
    what: str, action: Callable[[], T], *, level: int = logging.WARNING, with_traceback: bool = False
) -> T | None:
    """Do what must not end what works: watching, reporting, ending one of several parts. A failure is logged.

    Args:
        what: subject of "... failed: ...".
        action: what to do.
        level: of the log line.
        with_traceback: log it, too.

    Returns:
        what `action` returns; None where it failed.
    """
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - the boundary: the caller goes on without it
        logger.log(level, "%s failed: %s: %s", what, type(error).__name__, error, exc_info=with_traceback)
        return None


def settle(future: cf.Future[T], function: Callable[[], T]) -> None:
    """Give a future what a function returns, or raises: whoever waits for the future gets it."""
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - the boundary of a thread
        future.set_exception(error)
    else:
        future.set_result(result)


class CallTimeout(Exception):
    """A function took longer than it may. (Not a TimeoutError, which the function itself may raise.)"""


class DaemonThreads:
    """Runs functions in daemon threads, at most `limit` at a time, first come first served.

    A call that is given up, because it takes too long or its task is cancelled, frees its place. A thread cannot be
    ended: it goes on for as long as the function does.

    Args:
        name: of the threads.
        limit: how many.
        kills_processes: when a call is given up, kill the processes that it has started and their descendants. Not
            for functions that start a process for others, too.
    """

    def __init__(self, name: str, limit: int, *, kills_processes: bool = False) -> None:
        self.name, self.limit, self.kills_processes = name, limit, kills_processes
        self.num_lost = 0  # Calls that were given up and have not come back.
        self._num_threads = self._num_idle = 0
        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()

    async def run(self, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """Wait for a thread, call the function in it, and return its result or raise its exception.

        Args:
            timeout_s: longest time from the moment at which the function begins.

        Raises:
            CallTimeout: it took longer.
        """
        call = _Call(function, args)
        self._submit(call)
        try:
            await call.begun
            await asyncio.wait([call.result], timeout=timeout_s)
        finally:
            if not call.result.done():
                self._give_up(call)
        if not call.result.done():
            raise CallTimeout(f"it took more than {timeout_s:g} s")
        return call.result.result()

    def _submit(self, call: _Call) -> None:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()
            self._start_threads()

    def _start_threads(self) -> None:
        if len(self._waiting) > self._num_idle and self._num_threads < self.limit:
            self._num_threads += 1
            threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            with self._changed:
                call.is_done = True
                if call.is_lost:  # another thread has its place
                    self.num_lost -= 1
                    return

    def _next(self) -> _Call | None:
        with self._changed:
            while True:
                while not self._waiting:
                    self._num_idle += 1
                    was_notified = self._changed.wait(_IDLE_S)
                    self._num_idle -= 1
                    if not was_notified and not self._waiting:
                        self._num_threads -= 1
                        return None
                if not (call := self._waiting.popleft()).is_lost:
                    break
            call.thread_id = threading.get_native_id()
            call.children_before = _children(call.thread_id) if self.kills_processes else set()
            return call

    def _give_up(self, call: _Call) -> None:
        with self._changed:
            call.is_lost = not call.is_done
            if call.is_done or not call.thread_id:  # it ended just now, or has not begun and is left out
                return
            self.num_lost += 1
            self._num_threads -= 1
            self._start_threads()
            left = _children(call.thread_id) - call.children_before if self.kills_processes else set()
        for pid in left:
            _kill_tree(pid)


class _Call:
    """One call of a function, made by a task of the running loop."""

    def __init__(self, function: Callable[..., Any], values: tuple[Any, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._function, self._args, self._context = function, values, contextvars.copy_context()
        self.thread_id = 0
        self.children_before: set[int] = set()
        self.is_done = self.is_lost = False

    def run(self) -> None:
        """Call the function, in a thread of its own, and tell the loop when it begins and ends."""
        self._tell(self.begun.set_result, None)
        try:
            self._tell(self.result.set_result, self._context.run(self._function, *self._args))
        except StopIteration as error:  # no future takes it
            self._tell(self.result.set_exception, RuntimeError(f"it raised StopIteration: {error}"))
        except BaseException as error:  # whoever waits for the call raises it
            self._tell(self.result.set_exception, error)

    def _tell(self, setter: Callable[[Any], None], value: Any) -> None:
        def set_unless_cancelled() -> None:
            with contextlib.suppress(asyncio.InvalidStateError):
                if not self.is_lost:  # nobody would ask for its exception
                    setter(value)

        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(set_unless_cancelled)


def _children(thread_id: int, pid: int | str = "self") -> set[int]:
    """The child processes that one thread has started; none where the system does not tell."""
    with contextlib.suppress(OSError):
        return {int(child) for child in Path(f"/proc/{pid}/task/{thread_id}/children").read_text().split()}
    return set()


def _kill_tree(pid: int) -> None:
    threads = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)  # it starts no more children
        children = {child for thread in threads.iterdir() for child in _children(int(thread.name), pid)}
        os.kill(pid, signal.SIGKILL)
        for child in children:
            _kill_tree(child)
