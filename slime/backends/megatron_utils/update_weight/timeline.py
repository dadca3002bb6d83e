"""Where the time of a sync goes, as the source rank sees it: seconds a stage, for one line of the log.

It measures with the host's clock only, and waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Timeline:
    """Seconds by stage, in the order in which stages were first seen.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The block's time belongs to a stage."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - begin

    def making(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items; the time until each is there belongs to a stage."""
        left, end = iter(items), object()
        while True:
            with self.stage(name):
                item = next(left, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.4f}" for name, seconds in self._seconds.items())
