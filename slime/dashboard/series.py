"""metrics.jsonl as series, read once and then as far as it has grown.

A step that was logged twice counts as it was logged last: a resumed run repeats steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.dashboard.files import Lines
from slime.processes.directories import METRICS_FILE

MOST_NAMES = 5000
AXES = ("step", "time", "tokens", "samples")
LENGTH = "rollout/response_len/mean"


@dataclass
class Points:
    """One metric: parallel columns, in the order of the file."""

    step_key: str
    record: array[int] = field(default_factory=lambda: array("q"))
    step: array[float] = field(default_factory=lambda: array("d"))
    time: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))

    def add(self, record: int, step: float, time: float, value: float) -> None:
        """Append one value."""
        self.record.append(record)
        self.step.append(step)
        self.time.append(time)
        self.value.append(value)


class Series:
    """The metrics of one run.

    Args:
        directory: of the run.
        root: the given directory that it lies in.

    Attributes:
        points: by metric.
        alarms: as they were logged, with "step" and "time".
        num_records: that were read.
        first_time, last_time: seconds since 1970 of the first and the last record; 0.0 without one.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self._lines = Lines(directory / METRICS_FILE, root)
        self._generation = 0
        self._forget()

    def _forget(self) -> None:
        self.points: dict[str, Points] = {}
        self.alarms: list[dict[str, Any]] = []
        self.num_records = 0
        self.first_time = self.last_time = 0.0

    @property
    def num_broken(self) -> int:
        """Lines that hold no record."""
        return self._lines.num_broken

    def refresh(self) -> None:
        """Read what was written since."""
        records = self._lines.read()
        if self._lines.generation != self._generation:
            self._generation = self._lines.generation
            self._forget()
        for record in records:
            self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        step_key = record.get("step_key")
        step, time = _number(record.get(str(step_key))), _number(record.get("time"))
        if isinstance(record.get("alarm"), dict):
            name = str(record["alarm"].get("name"))
            self.alarms.append({**record["alarm"], "name": name, "step": step, "time": time})
            return
        if not isinstance(step_key, str) or step is None or not math.isfinite(step):
            return
        self.num_records += 1
        time = self.last_time if time is None else time
        self.first_time, self.last_time = self.first_time or time, max(self.last_time, time)
        for name, value in record.items():
            number = math.nan if value is None else _number(value, is_flag=True)
            if name in ("step_key", "time", step_key) or number is None:
                continue
            if name not in self.points and len(self.points) >= MOST_NAMES:
                continue
            points = self.points.setdefault(name, Points(step_key))
            points.add(self.num_records, step, time, number)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None where there is none, or it is not finite."""
        points = self.points.get(name)
        return finite(points.value[-1]) if points else None

    def select(
        self, name: str, *, axis: str = "step", after: int = 0, most: int = 2000, samples_per_rollout: float = 0.0
    ) -> dict[str, Any]:
        """Return one metric as `{"x": [...], "y": [...]}`, sorted by x.

        Args:
            name: of the metric.
            axis: one of `AXES`: the step, seconds since the run's first record, or tokens or samples so far.
            after: leave out records up to this one.
            most: points; of more the means of neighbours are returned, with "of", how many each stands for.
            samples_per_rollout: needed for tokens and samples.
        """
        points = self.points.get(name)
        if points is None:
            return {"x": [], "y": []}
        last: dict[float, tuple[float, float]] = {}
        first = bisect_right(points.record, after)
        for step, time, value in zip(points.step[first:], points.time[first:], points.value[first:], strict=True):
            last[step] = (time, value)
        steps = sorted(last)
        x = steps if axis == "step" else self._positions(axis, [last[step][0] for step in steps], samples_per_rollout)
        return {"step_key": points.step_key, **_thinned(x, [last[step][1] for step in steps], most)}

    def _positions(self, axis: str, times: list[float], samples_per_rollout: float) -> list[float]:
        if axis == "time":
            return [time - self.first_time for time in times]
        lengths = self.points.get(LENGTH)
        if lengths is None or not samples_per_rollout:
            return [math.nan] * len(times)
        sums, total = [0.0], 0.0
        for length in lengths.value:
            total += samples_per_rollout * (length if axis == "tokens" else 1.0)
            sums.append(total)
        return [sums[bisect_right(lengths.time, time)] for time in times]


def _thinned(x: list[float], y: list[float], most: int) -> dict[str, Any]:
    size = -(-len(x) // max(most, 1))
    if size <= 1:
        return {"x": [finite(value) for value in x], "y": [finite(value) for value in y]}
    parts = [slice(begin, begin + size) for begin in range(0, len(x), size)]
    return {"x": [finite(x[part][-1]) for part in parts], "y": [_mean(y[part]) for part in parts], "of": size}


def _mean(values: list[float]) -> float | None:
    kept = [value for value in values if math.isfinite(value)]
    return sum(kept) / len(kept) if kept else None


def finite(value: float) -> float | None:
    """Return a number, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


def _number(value: Any, *, is_flag: bool = False) -> float | None:
    """A value as a float; None where it is none, a bool that is not asked for, or too large for one."""
    if not isinstance(value, int | float) or (isinstance(value, bool) and not is_flag):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
