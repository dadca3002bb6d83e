"""Named wall-clock timers of one process.

It measures and hands out sums; it does not know what the names mean nor where the numbers are logged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")


class Timer:
    """The one table of timers of a process: `Timer()` always returns the same object.

    Example:
        >>> Timer().reset()
        >>> with timer("train"):
        ...     pass
        >>> sorted(Timer().log_dict())
        ['train']
    """

    _instance: ClassVar[Timer | None] = None
    seconds: dict[str, float]
    _started: dict[str, float]

    def __new__(cls) -> Self:
        if cls._instance is None:
            made = super().__new__(cls)
            made.seconds, made._started = {}, {}
            cls._instance = made
        return cls._instance  # type: ignore[return-value]

    def start(self, name: str) -> None:
        """Start `name`; a name that already runs is a programming error."""
        if name in self._started:
            raise ValueError(f"timer {name!r} is already running; end it before starting it again")
        self._started[name] = time.perf_counter()

    def end(self, name: str) -> float:
        """End `name`, add what it took to its sum, and return what it took in seconds."""
        if name not in self._started:
            raise ValueError(f"timer {name!r} is not running; start it first")
        elapsed = time.perf_counter() - self._started.pop(name)
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        return elapsed

    def add(self, name: str, elapsed_s: float) -> None:
        """Add a duration that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s

    def is_running(self, name: str) -> bool:
        """Whether `name` was started and not ended."""
        return name in self._started

    def log_dict(self) -> dict[str, float]:
        """Seconds per name summed since the last reset (a copy)."""
        return dict(self.seconds)

    def reset(self, name: str | None = None) -> None:
        """Forget the sum of `name`, or of every name; timers that run go on running."""
        if name is None:
            self.seconds.clear()
        else:
            self.seconds.pop(name, None)

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Time a block; the time counts also when the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


@overload
def timer(name_or_func: str) -> Any: ...
@overload
def timer(name_or_func: Callable[P, R]) -> Callable[P, R]: ...
def timer(name_or_func: str | Callable[..., Any]) -> Any:
    """`with timer("name"):`, `@timer` (named after the function) or `@timer("name")`."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)  # a contextmanager object is a decorator, too
    func = name_or_func

    @functools.wraps(func)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(func.__name__):
            return func(*args, **kwargs)

    return timed


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop the running timer `name` for the length of a block, then start it again: for "time spent waiting" sums."""
    if Timer().is_running(name):
        Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred: Callable[[], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: call `deferred()` after the function returned or raised."""

    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return func(*args, **kwargs)
            finally:
                deferred()

        return wrapped

    return decorate
