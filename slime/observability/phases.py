"""Which phase a run is in, how long phases have taken, and for how long nothing has gone on in this one.

Its users report progress, and decide what is done about a phase that stalls.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

KEPT = 100
# A phase that was shorter had nothing to do (no checkpoint was due), and says nothing about its usual length.
NOTHING_S = 0.05
MEDIANS = 6.0  # A phase without progress for so many times its usual length is stalled.


@dataclass(frozen=True)
class Phase:
    """The phase that a run is in.

    Attributes:
        name: "generate", "train", ...
        seconds: since it began.
        silent_s: since something last went on in it.
    """

    name: str
    seconds: float
    silent_s: float


class Phases:
    """The phases of one run; one thread enters them, another looks.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[tuple[str, float]] = []
        self._last_progress = clock()
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._history: deque[tuple[str, float]] = deque(maxlen=KEPT)

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Be in a phase; one inside another takes its place until it is over."""
        begin = self._clock()
        self._stack.append((name, begin))
        self.went_on()
        try:
            yield
        finally:
            self._stack.pop()
            self.went_on()
            seconds = self._clock() - begin
            if seconds >= NOTHING_S:
                self._durations[name].append(seconds)
                self._history.append((name, seconds))

    def went_on(self) -> None:
        """Something was done."""
        self._last_progress = self._clock()

    def current(self) -> Phase | None:
        """The innermost phase; None between phases."""
        if not (stack := list(self._stack)):
            return None
        (name, begin), now = stack[-1], self._clock()
        return Phase(name, now - begin, now - self._last_progress)

    def limit_s(self, name: str, at_least_s: float) -> float:
        """Seconds without progress after which a phase is stalled: six times its median, `at_least_s` at least."""
        durations = list(self._durations[name])
        return max(at_least_s, MEDIANS * statistics.median(durations)) if durations else at_least_s

    def history(self) -> list[str]:
        """A line for each kind of phase, and one for those that were last."""
        lines = [
            f"{name:>10}: {len(done)} times, median {statistics.median(done):.1f} s, longest {max(done):.1f} s"
            for name, done in list(self._durations.items())
            if done
        ]
        last = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in list(self._history)[-10:])
        return [*lines, f"the last ones: {last or 'none'}"]


def seconds(value: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


class HasPhases(Protocol):
    """Whose methods are phases."""

    phases: Phases


F = TypeVar("F", bound=Callable[..., Any])


def phase(name: str) -> Callable[[F], F]:
    """Make a method of something that has `phases` one of them."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def inner(self: HasPhases, *args: Any, **keywords: Any) -> Any:
            with self.phases.enter(name):
                return method(self, *args, **keywords)

        return inner  # type: ignore[return-value]

    return wrap
