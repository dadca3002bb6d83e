"""A run's attempts at its rollouts: the first, and one more after each loss of an actor, --max-restarts at most.

    for attempt in attempts(max_restarts, start_again):
        with attempt:
            ...the schedule, from the first rollout that is still to do...

What is lost with a process is what it held; any other failure would happen again, and ends the run. It knows neither
what runs in an attempt nor how another one is prepared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from slime.ray.utils import ActorLost

logger = logging.getLogger(__name__)


class Attempt:
    """One attempt, as a context; where another may follow, the loss of an actor ends it quietly.

    Args:
        is_last: none may follow.
    """

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self.loss: ActorLost | None = None
        """What ended it, where another is to follow."""

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
