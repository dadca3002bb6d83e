"""One event loop in a background thread, for synchronous code that has to run coroutines.

It does not know what the coroutines do. Inside a coroutine use `await`, never `run`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_S = 60.0
"""Until a task that was told to end has done so; what it awaits in its `finally` takes time."""


class AsyncLoop(metaclass=SingletonMeta):
    """The process's background event loop; started at first use, a daemon thread ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="slime-async", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, wait, return its result or raise its exception; an interrupt cancels it."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("async_utils.run was called on the loop's own thread; use await")
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def get_async_loop() -> AsyncLoop:
    """The one background loop of this process."""
    return AsyncLoop()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's background loop and return its result."""
    return get_async_loop().run(coro)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T] | Awaitable[T]]) -> list[T]:
    """Results of all, in order; when one fails the others are cancelled and its error is raised."""
    coroutines = list(coroutines)
    if len(coroutines) == 1:
        return [await coroutines[0]]  # needs no task of its own
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise


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
