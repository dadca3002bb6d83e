"""A pool of sandboxes that are open before anybody asks: for backends that take seconds to make one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.results import OPEN_S


class SandboxPool:
    """Keeps `size` fresh sandboxes; each is used once, and ends after it.

    Wait graph: `take` waits for the oldest sandbox that is being made; nothing waits for `take`.

    Args:
        make: makes a sandbox that is not open yet.
        size: how many are kept ready.
        longest_idle_s: an older one is thrown away, for services end sandboxes after a time.
    """

    def __init__(self, make: Callable[[], Sandbox], *, size: int, longest_idle_s: float = 600.0) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} sandboxes: at least 1")
        self.make, self.size, self.longest_idle_s = make, size, longest_idle_s
        self._warm: deque[tuple[float, asyncio.Task[Sandbox]]] = deque()
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(2 * OPEN_S):
            await asyncio.gather(*(self._discard(task) for _, task in self._warm), *self._ending)
        self._warm.clear()

    def _fill(self) -> None:
        while len(self._warm) < self.size:
            self._warm.append((time.monotonic(), asyncio.create_task(_opened(self.make()))))

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, for the block.

        Raises:
            SandboxError: it could not be made; the next one is tried anew.
        """
        while self._warm and time.monotonic() - self._warm[0][0] > self.longest_idle_s:
            self._end_later(self._warm.popleft()[1])
        self._fill()
        born, task = self._warm.popleft()
        try:
            sandbox = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._warm.appendleft((born, task))  # Another one takes it.
            raise
        self._fill()
        try:
            yield sandbox
        finally:
            await sandbox.__aexit__(None, None, None)

    def _end_later(self, task: asyncio.Task[Sandbox]) -> None:
        ending = asyncio.create_task(self._discard(task))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    @staticmethod
    async def _discard(task: asyncio.Task[Sandbox]) -> None:
        """End a sandbox that nobody has used; what it failed with concerns nobody."""
        await asyncio.wait([task], timeout=OPEN_S)
        if not task.done():
            task.cancel()
        elif not task.exception():
            await task.result().__aexit__(None, None, None)


async def _opened(sandbox: Sandbox) -> Sandbox:
    return await sandbox.__aenter__()
