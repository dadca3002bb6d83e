"""Whether a run is to end before its last rollout: after a signal, or when its time is over.

The run then finishes the rollout that it is at, saves and ends with status 0. A second signal ends it as the first one
would have without --exit-signal-handler. It knows nothing about rollouts.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


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
