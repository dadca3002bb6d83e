"""metrics.jsonl as series, read once and then as far as it has grown; and the lines of any file that grows.

A step that was logged twice counts as it was logged last: a resumed run repeats steps.

Whoever writes a run may write anything: a line may be cut short, too long, not UTF-8 or no JSON, and a name may be a
link that leads elsewhere. Such lines are counted and left out; such files are not there.
"""

from __future__ import annotations

import json
import logging
import math
import os
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
LONGEST_LINE = 16 << 20


class Lines:
    """The JSON objects that were appended to a file since the last read.

    Args:
        path: may not exist yet.
        root: the file, links followed, must lie in it.

    Attributes:
        num_broken: lines that were left out.
        generation: grows when the file was replaced or cut, and reading began again.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._offset, self._inode, self._rest = 0, 0, b""
        self.num_broken = self.generation = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of the lines that are complete now."""
        found: list[dict[str, Any]] = []
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_size) == (self._inode, self._offset):
                return found  # a page looks each second: most looks end here
            if not is_inside(self._path, self._root):
                return found
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:  # replaced: it is read anew
                    self.generation += bool(self._inode)
                    self._inode, self._offset, self._rest, self.num_broken = status.st_ino, 0, b"", 0
                file.seek(self._offset)
                while chunk := file.read(CHUNK_BYTES):
                    self._offset += len(chunk)
                    found += self._objects(chunk)
        except OSError:
            return found  # it is not there, or not ours to read
        return found

    def _objects(self, chunk: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b"{"  # what follows of this line is no object
        found = [parsed for line in lines if line.strip() and (parsed := parse_object(line)) is not None]
        self.num_broken += sum(bool(line.strip()) for line in lines) - len(found)
        return found


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None where it holds something else."""
    try:
        value = json.loads(line.decode(errors="replace"), parse_int=_int)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _int(text: str) -> int | str:
    """Return a whole number; as text one that is too large for any step, size or clock."""
    return int(text) if len(text) <= 18 else text


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path, links followed, lies in a directory.

    Args:
        path: may not exist.
        root: resolved.
    """
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a circle of links, or a name that no file system has
        return False


def read_text(path: Path, root: Path, *, limit: int, from_end: bool = False) -> str | None:
    """Return the first or the last `limit` bytes of a text file; None where it is not there or leads elsewhere."""
    if not is_inside(path, root):
        return None
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit) if from_end else 0)
            return file.read(limit).decode(errors="replace")
    except OSError:
        return None


def read_object(path: Path, root: Path, *, limit: int = CHUNK_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds; empty where there is none."""
    text = read_text(path, root, limit=limit)
    return (parse_object(text.encode()) if text else None) or {}


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
        path: of metrics.jsonl.
        root: the given directory that it lies in.

    Attributes:
        points: by metric.
        alarms: as they were logged, with "step" and "time".
        num_records: that were read.
        first_time, last_time: seconds since 1970 of the first and the last record; 0.0 without one.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._lines = Lines(path, root)
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


def read_series(path: Path) -> dict[str, dict[float, float]]:
    """Return every metric of a metrics.jsonl as {name: {step: value}}, the values that are finite; of a step that was
    logged twice (a resumed run) the later one. Lines that hold no record are counted in a warning."""
    series = Series(path, path.resolve().parent)
    series.refresh()
    if series.num_broken:
        logger.warning("%s has %d lines that hold no record; they are left out", path, series.num_broken)
    pairs = {name: zip(points.step, points.value, strict=True) for name, points in series.points.items()}
    found = {name: {step: value for step, value in of if math.isfinite(value)} for name, of in pairs.items()}
    return {name: values for name, values in found.items() if values}


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
