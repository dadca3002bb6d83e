"""The watchdog: a thread of the driver that notices when nothing goes on in a phase any more (--stall-timeout).

A phase is stalled when it has made no progress for six times its own median, `--stall-timeout` at least. Progress is
whatever `look` returns being another than before, and the begin of a phase. A stalled phase is reported once; it is
the listener that reports, and ends the run or does not. It knows nothing about Ray.

Wait graph: it waits for `look` and for the report, which have deadlines of their own; nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from slime.observability.phases import Phase, Phases

logger = logging.getLogger(__name__)

SLOW = {"start": 900.0}
"""Phases that count nothing while they work: processes start and weights are read."""
LOOKS = 10
"""Looks within the time that a phase may be silent for."""


class StallWatch:
    """A watch over phases.

    Args:
        phases: of the run.
        look: something that changes when anything is done.
        look_closely: likewise, at a cost: it is asked only in a phase that has been silent for half its time.
        on_stall: called in the watch's thread with the phase that stalled and how long it may be silent for.
        timeout_s: the least time that a phase may be silent for.
    """

    def __init__(
        self,
        phases: Phases,
        look: Callable[[], Any],
        look_closely: Callable[[], Any],
        on_stall: Callable[[Phase, float], None],
        *,
        timeout_s: float,
    ) -> None:
        self._phases = phases
        self._looks = {"look": look, "closely": look_closely}
        self._on_stall = on_stall
        self._timeout_s = timeout_s
        self._seen: dict[str, Any] = {}
        self._is_reported = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a report that is being written goes on."""
        self._over.set()

    def look(self) -> None:
        """Look once."""
        phase = self._phases.current()
        if phase is None:
            return
        limit_s = self._phases.limit_s(phase.name, max(self._timeout_s, SLOW.get(phase.name, 0.0)))
        looks = ("look", "closely") if phase.silent_s >= limit_s / 2 else ("look",)
        changed = [self._has_changed(one) for one in looks]  # each: the next look compares with what there is now
        if any(changed):
            self._phases.went_on()
            self._is_reported = False
        elif phase.silent_s < limit_s:
            self._is_reported = False
        elif not self._is_reported:
            self._is_reported = True
            self._on_stall(phase, limit_s)

    def _has_changed(self, look: str) -> bool:
        try:
            found = self._looks[look]()
        except Exception as error:  # noqa: BLE001 - the watch must outlive what it looks at
            logger.debug("the watchdog could not look: %s", error)
            return False
        has_changed = look in self._seen and self._seen[look] != found
        self._seen[look] = found
        return has_changed

    def _run(self) -> None:
        while not self._over.wait(max(0.05, min(30.0, self._timeout_s / LOOKS))):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a watch that fails must not leave the run unwatched
                logger.exception("the watchdog failed")


def clock() -> str:
    """Now, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
