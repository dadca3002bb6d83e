"""How often something was done within the last hour; it does not know what."""

from __future__ import annotations

import time
from collections import deque

HOUR_S = 3600.0


class LastHour:
    """Counts what was done, and forgets it after an hour."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def count(self) -> int:
        """How often it was done within the last hour."""
        now = time.monotonic()
        while self._times and now - self._times[0] > HOUR_S:
            self._times.popleft()
        return len(self._times)

    def note(self, times: int = 1) -> None:
        """It is done now."""
        self._times.extend([time.monotonic()] * times)
