"""One event loop in a background thread, for synchronous code that has to run coroutines.

It does not know what the coroutines do. Inside a coroutine use `await`, never `run`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from slime.utils.misc import SingletonMeta

T = TypeVar("T")


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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
