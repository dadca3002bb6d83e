"""Which phase a run is in, how long phases have taken, for how long nothing has gone on in this one, and all this
shown: bars at the bottom of a terminal, or a line now and then where there is none.

Its users report progress, and decide what is done about a phase that stalls. On a terminal rich keeps the bars below
everything that this process prints: it takes the place of stdout and stderr.
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slime.processes.progress import Count
from slime.utils.misc import attempt

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

KEPT = 100
# A phase that was shorter had nothing to do (no checkpoint was due), and says nothing about its usual length.
NOTHING_S = 0.05
MEDIANS = 6.0  # A phase without progress for so many times its usual length is stalled.
PERIOD_S = 1.0
START = "start"
START_QUIET_S, LONG_QUIET_S = 10.0, 60.0
"""Without a terminal a phase says what it does every so many seconds; the start does it more often at first."""


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

    def silence(self, limit_s: float) -> str:
        """Return the sentence that says what has stalled, for a phase that may be silent for so many seconds."""
        return (
            f"nothing has gone on in the phase {self.name!r} for {seconds(self.silent_s)} (it began "
            f"{seconds(self.seconds)} ago; it may be silent for {seconds(limit_s)}: six times its median, and "
            f"--stall-timeout at least)"
        )


class Phases:
    """The phases of one run; one thread enters them, another looks.

    Args:
        clock: seconds, from anywhere.
        on_change: called with "begin" or "end" and the phase's name.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[str, str], None] = lambda change, name: None,
    ) -> None:
        self._clock, self._on_change = clock, on_change
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
        self._on_change("begin", name)
        try:
            yield
        finally:
            self._stack.pop()
            self._on_change("end", name)
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


F = TypeVar("F", bound=Callable[..., Any])


def phase(name: str) -> Callable[[F], F]:
    """Make a method of something that has `phases` one of them."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def inner(self: Any, *args: Any, **keywords: Any) -> Any:
            with self.phases.enter(name):
                return method(self, *args, **keywords)

        return inner  # type: ignore[return-value]

    return wrap


class RunStatus:
    """The status of one run.

    Args:
        phases: of the run.
        counts: returns the counts of work that is under way in other processes; may fail.
        say: writes a line, for a terminal or a log.
        news: returns what a start that has lasted so many seconds is at, "" for nothing; may fail.
    """

    def __init__(
        self,
        phases: Phases,
        counts: Callable[[], Sequence[Count]],
        say: Callable[[str], None],
        news: Callable[[float], str] = lambda _: "",
    ) -> None:
        self._phases, self._counts, self._say, self._news = phases, counts, say, news
        self._doing, self._since_s = "", 0.0
        self._said: tuple[str, float] = ("", 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._bars = _bars()

    def begin(self) -> None:
        """Show the status from now on."""
        if self._bars is not None:
            self._rollouts = self._bars.add_task("rollouts", total=None, visible=False, text="")
            self._work = self._bars.add_task(START, total=None, text="")
            self._bars.start()
            # A driver that is killed leaves the terminal as it is: with its cursor.
            self._bars.console.show_cursor(True)
        self._thread.start()

    def announce(self, doing: str) -> None:
        """Say which part of the start begins."""
        phase = self._phases.current()
        self._doing, self._since_s = doing, 0.0 if phase is None else phase.seconds
        self._say(doing)

    def count_rollouts(self, done: int, total: int) -> None:
        """Say how many rollouts of the run are done."""
        if self._bars is not None:
            self._bars.update(self._rollouts, completed=done, total=total, visible=True, text=f"{done}/{total}")

    def end(self) -> None:
        """Show nothing more; the bars are gone when it returns."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * PERIOD_S)  # it may be in a call of a Ray that does not answer
        if self._bars is not None:
            self._bars.stop()

    def look(self) -> None:
        """Show what goes on now."""
        phase = self._phases.current()
        if phase is None:
            return
        if self._bars is None:
            self._say_if_quiet(phase)
            return
        what, done, total = self._newest_count(phase)
        text = f"{f'{done}/{total} ' if total else ''}{seconds(self._lasts_s(phase))}"
        self._bars.update(self._work, description=what, completed=done, total=total or None, text=text)

    def _say_if_quiet(self, phase: Phase) -> None:
        """Say something once in every period of a phase, but for its first: short phases say nothing."""
        what = self._doing if phase.name == START else phase.name
        lasts_s = self._lasts_s(phase)
        is_short = phase.name == START and lasts_s < LONG_QUIET_S
        period = lasts_s // START_QUIET_S if is_short else LONG_QUIET_S * (lasts_s // LONG_QUIET_S)
        if (what, period) == self._said:
            return
        self._said = (what, period)
        if period:
            what, done, total = self._newest_count(phase)
            count = f" {done}/{total}" if total else ""
            news = self._news_of(phase) if phase.name == START and not is_short else ""
            self._say(f"{what}{count}: {seconds(lasts_s)} so far{f'; {news}' if news else ''}")

    def _news_of(self, start: Phase) -> str | None:
        news, error = attempt(self._news, start.seconds)
        if error is not None:  # what only shows must not end what works
            logger.debug("nothing is known of the start: %s", error)
        return news

    def _lasts_s(self, phase: Phase) -> float:
        """Seconds of a phase, or of the part of the start that was announced last."""
        return phase.seconds - (self._since_s if phase.name == START else 0.0)

    def _newest_count(self, phase: Phase) -> Count:
        """Return what goes on, and its count where something is counted."""
        if phase.name == START:
            return self._doing or START, 0, 0
        try:
            counts = self._counts()
        except Exception as error:  # noqa: BLE001 - a boundary: what only shows must not end what works
            logger.debug("nothing is counted: %s", error)
            counts = []
        return counts[-1] if counts else (phase.name, 0, 0)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.look()


def _bars() -> Progress | None:
    """Bars for this process's terminal; None where stdout is none, or one that cannot move its cursor (TERM=dumb)."""
    from rich.console import Console  # trainers import this module, too, and show nothing
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console()
    if not sys.stdout.isatty() or not console.is_interactive:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
        refresh_per_second=2,
        redirect_stderr=sys.stderr.isatty(),
    )
