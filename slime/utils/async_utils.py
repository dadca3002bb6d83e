"""One event loop in a background thread, for synchronous code that has to run coroutines.

Inside a coroutine use `await`, never `run`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from slime.processes.wait import settle
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_S = 60.0  # Until a task that was told to end has done so; what it awaits in its `finally` takes time.


class AsyncLoopThread(metaclass=SingletonMeta):
    """The process's background event loop; started at first use, a daemon thread ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended: cf.Future[Any] = cf.Future()
        self._thread = threading.Thread(
            target=settle, args=(self._ended, self._serve), name="slime-async", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        """Run the loop, and again where user code stopped it: the requests of everybody else are in it."""
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
                logger.error("user code stopped the event loop; it goes on")
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets them out of a task; its waiter gets it
                logger.error("a task raised %s(%s); the event loop goes on", type(error).__name__, error)

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, wait, return its result or raise its exception; an interrupt cancels it.

        Raises:
            RuntimeError: the loop has ended, or a task raised SystemExit, KeyboardInterrupt or CancelledError, which
                would end this thread, too, or look as if somebody had cancelled it.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("async_utils.run was called on the loop's own thread; use await")
        if self._ended.done():
            coro.close()
            raise self._end_of(coro)
        ended, begun = self._ended, list[cf.Future[T]]()
        with contextlib.ExitStack() as interrupt:  # which may come as soon as the work has begun
            interrupt.callback(lambda: [future.cancel() for future in begun])
            begun.append(asyncio.run_coroutine_threadsafe(coro, self.loop))
            cf.wait([*begun, ended], return_when=cf.FIRST_COMPLETED)
            interrupt.pop_all()
        [future] = begun
        if not future.done():
            raise self._end_of(coro)
        try:
            return future.result()
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError, cf.CancelledError) as error:
            raise RuntimeError(f"{_name(coro)} was ended by {type(error).__name__}: {error}") from error

    def _end_of(self, coro: Coroutine[Any, Any, Any]) -> RuntimeError:
        cause = self._ended.exception(timeout=0)
        error = RuntimeError(f"the event loop of {_name(coro)} has ended: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error


os.register_at_fork(after_in_child=AsyncLoopThread.clear_instances)  # a forked child has the loop, not its thread


def _name(coro: Coroutine[Any, Any, Any]) -> str:
    return getattr(coro, "__name__", repr(coro))


def get_async_loop() -> AsyncLoopThread:
    """The one background loop of this process."""
    return AsyncLoopThread()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's background loop and return its result."""
    return get_async_loop().run(coro)


def is_cancellation(error: BaseException) -> bool:
    """Whether an error tells the running task that it is cancelled, or closed, and has to reach whoever did that.

    A CancelledError that nobody sent to this task (code raised it, or awaited what somebody else cancelled) is none.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            return False
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T] | Awaitable[T]]) -> list[T]:
    """Results of all, in order; when one fails the others are cancelled and its error is raised."""
    coroutines = list(coroutines)
    if len(coroutines) == 1:
        return [await coroutines[0]]  # needs no task of its own
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(task for task in tasks if not task.done())


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Tell tasks to end and wait until they have, for `CANCEL_S`; the log names one that goes on (user code may).

    Their results and errors are of no interest any more.
    """
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, left = await asyncio.wait(tasks, timeout=CANCEL_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # otherwise asyncio says that nobody has asked for it
    for task in left:
        logger.error("still running %.0f s after it was cancelled, and left alone: %r", CANCEL_S, task)
