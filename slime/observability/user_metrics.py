"""Numbers that a user's functions log with `slime.log`, averaged until the process's next record is sent.

A generate function logs once for each sample, and from several threads; a tracker gets one value for each metric and
step. This module does not know where records go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

STEP_KEY = "rollout/step"
RESERVED = ("step_key", "time", STEP_KEY)
"""Names that a line of metrics.jsonl has anyway."""


class UserMetrics:
    """The owner of the sums, by step and name."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, tuple[float, int]]] = {}
        self._lock = threading.Lock()

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Count one value of each metric."""
        with self._lock:
            sums = self._sums.setdefault(step, {})
            for name, value in values.items():
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)

    def take(self) -> list[dict[str, float]]:
        """Return the mean of each metric since the last call, one record for each step."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return [
            {name: total / count for name, (total, count) in sums.items()} | {STEP_KEY: step}
            for step, sums in sorted(taken.items())
        ]


def check_record(metrics: object, step: object) -> None:
    """Check what `slime.log` was given.

    Raises:
        TypeError: `metrics` is no dict with names, or `step` is no whole number.
        ValueError: the step is negative, or a name is one that every record has.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"slime.log takes a dict of metric names and numbers, not {str(metrics)[:80]!r}")
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"slime.log takes the number of the rollout as its step, a whole number, not {step!r}")
    if step < 0:
        raise ValueError(f"slime.log got the step {step}; rollouts are counted from 0")
    if taken := [name for name in RESERVED if name in metrics]:
        raise ValueError(f"slime.log got a metric named {taken[0]!r}, which every record has; name it otherwise")
