"""Which rollouts a driver does: those it begins ahead, the last one, and another attempt at them after a loss.

    for attempt in attempts(max_restarts, start_again):
        with attempt:
            ...the schedule, from the first rollout that is still to do...

Only what a process held is lost with it; any other failure would happen again, and ends the run.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from slime.ray.utils import ActorLost

if TYPE_CHECKING:
    from slime.ray.run import PendingRollout, TrainingRun

logger = logging.getLogger(__name__)


class Attempt:
    """One attempt, as a context; where another may follow, the loss of an actor ends it quietly.

    Args:
        is_last: none may follow.
    """

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self.loss: ActorLost | None = None  # What ended it, where another is to follow.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, ActorLost) and not self._is_last:
            self.loss = error
        return self.loss is not None


def attempts(max_restarts: int, start_again: Callable[[], None]) -> Iterator[Attempt]:
    """The attempts of a run.

    Args:
        max_restarts: attempts after the first one.
        start_again: prepares another after a loss; an actor that is lost meanwhile costs that attempt.

    Raises:
        ActorLost: while the last one was prepared.
    """
    loss: ActorLost | None = None
    for left in range(max_restarts, -1, -1):
        attempt = Attempt(is_last=not left)
        if loss is None or _is_prepared(attempt, start_again):
            yield attempt
        if (loss := attempt.loss) is None:
            return
        logger.error("%s", loss)
        logger.error(
            "the run goes on, from its newest checkpoint if it has one (--max-restarts: %d left after this one)",
            left - 1,
        )


def _is_prepared(attempt: Attempt, start_again: Callable[[], None]) -> bool:
    begin = time.monotonic()
    with attempt:
        start_again()
    if attempt.loss is None:
        logger.warning("the run goes on, %.1f s after the loss was noticed", time.monotonic() - begin)
    return attempt.loss is None


class ExitRequest:
    """The wish to end, looked at by the run.

    Args:
        signal_name: which signal asks for it ("SIGTERM"); None for none.
        minutes: after which it is asked for, counted from here; None for never.
    """

    def __init__(self, signal_name: str | None, minutes: int | None) -> None:
        self._signal = None if signal_name is None else signal.Signals[signal_name]
        self._minutes, self._begin = minutes, time.monotonic()
        self._before: Any = None
        self._was_asked = False

    @property
    def is_possible(self) -> bool:
        """Whether any rollout may turn out to be the last."""
        return self._signal is not None or self._minutes is not None

    def listen(self) -> None:
        """Take the signal over, in the main thread; elsewhere none arrives."""
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(self._signal, self._note)

    def why(self) -> str | None:
        """What asks for the end, as the beginning of a sentence; None while nothing does."""
        if self._was_asked and self._signal is not None:
            return f"{self._signal.name} arrived"
        if self._minutes is not None and time.monotonic() - self._begin >= 60.0 * self._minutes:
            return f"--exit-duration-in-mins {self._minutes} are over"
        return None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._was_asked = True
        signal.signal(signum, self._before)
        logger.warning("%s: the run ends after this rollout; another one ends it now", signal.Signals(signum).name)


class RolloutsAhead:
    """At most `limit` rollouts ahead of the one that is trained.

    Args:
        run: generates them.
        limit: rollouts that may be begun or done while another is trained (--async-buffer-size).
    """

    def __init__(self, run: TrainingRun, limit: int) -> None:
        self._run, self._limit = run, limit
        self._begun: deque[PendingRollout] = deque()

    def take(self, rollout_id: int) -> PendingRollout:
        """This rollout, once its samples are there; then those after it are begun, as many as may be."""
        if not self._begun:
            self._begun.append(self._run.start_generate(rollout_id))
        rollout = self._run.wait_generated(self._begun.popleft())
        self._fill(rollout_id)
        return rollout

    def drain(self) -> None:
        """Wait until all of them are generated. The manager does them in order, so the last one stands for all."""
        self._run.drain(self._begun[-1] if self._begun else None)

    def _fill(self, trained: int) -> None:
        while len(self._begun) < self._limit:
            following = trained + len(self._begun) + 1
            if self._run.is_last(following - 1) or not self._run.may_start(following):
                return
            self._begun.append(self._run.start_generate(following))
