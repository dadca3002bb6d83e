"""Which runs there are in the given directories, and what each of them has written so far.

A run is a directory with a metrics.jsonl. It says more of itself in run_events.jsonl (slime.observability.run_events);
a run without that file, written earlier or by something else, is shown from its metrics alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from slime.dashboard.records import SampleFile, SampleFiles
from slime.dashboard.series import Lines, Series, is_inside
from slime.observability.run_events import FILE as EVENTS_FILE
from slime.processes.directories import METRICS_FILE

EVAL_SAMPLES_FILE = "eval_samples.jsonl"
DEPTH = 3
MOST_RUNS = 500
LOOK_AGAIN_S = 0.5
SCAN_AGAIN_S = 5.0
# A run that says nothing of its process counts as running for as long after its last record.
QUIET_S = 300.0
SKIPPED = re.compile(r"iter_\d+|rollouts?|logs|profile|\..*")


class Run:
    """One run.

    Args:
        directory: of the run.
        root: the given directory that it lies in, resolved.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory, self.root = directory, root
        relative = directory.relative_to(root)
        self.name = root.name if relative == Path() else f"{root.name}/{relative}"
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")[-60:] or "run"
        self.id = f"{slug}-{hashlib.sha256(str(directory).encode()).hexdigest()[:6]}"
        self.series = Series(directory, root)
        self.rollouts = SampleFiles(directory, root)
        self.events: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self._event_lines = Lines(directory / EVENTS_FILE, root)
        self._answer_lines = Lines(directory / EVAL_SAMPLES_FILE, root)
        self._made: dict[SampleFile, Any] = {}
        self._seen = 0.0
        self.lock = threading.RLock()

    def refresh(self) -> None:
        """Read what was written since, unless somebody has just done so."""
        with self.lock:
            if time.monotonic() - self._seen < LOOK_AGAIN_S:
                return
            self.series.refresh()
            self._extend(self._event_lines, self.events)
            self._extend(self._answer_lines, self.answers)
            self.rollouts.refresh()
            self._seen = time.monotonic()

    def _extend(self, lines: Lines, kept: list[dict[str, Any]]) -> None:
        generation, new = lines.generation, lines.read()
        if lines.generation != generation:
            kept.clear()
        kept += new

    def kept(self, file: SampleFile, make: Callable[[], Any]) -> Any:
        """Return what was made of a file before, or make it; as many are kept as there are files."""
        for old in set(self._made) - set(self.rollouts.files.values()):
            del self._made[old]
        if file not in self._made:
            try:
                self._made[file] = make()
            except (LookupError, ValueError):  # removed meanwhile, or no samples
                return {}
        return self._made[file]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever a page may look different."""
        return (
            self.series.num_records + len(self.series.alarms),
            len(self.events),
            len(self.answers),
            self.rollouts.version,
        )

    @property
    def start(self) -> dict[str, Any]:
        """What the run said when it was started last; empty where it said nothing."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})

    @property
    def flags(self) -> dict[str, Any]:
        """Flag -> value; empty where the run did not record them."""
        flags = self.start.get("flags")
        return flags if isinstance(flags, dict) else {}

    @property
    def samples_per_rollout(self) -> float:
        """Samples of one rollout; 0.0 where nobody knows."""
        sizes = [self.flags.get(name) for name in ("rollout_batch_size", "n_samples_per_prompt")]
        if all(isinstance(size, int) for size in sizes):
            return float(sizes[0] * sizes[1])  # type: ignore[operator]
        return 0.0

    def status(self) -> str:
        """Return running, finished, failed, stopped, lost (its process is gone) or ended (it does not say how)."""
        begun = max((i for i, event in enumerate(self.events) if event.get("event") == "start"), default=None)
        if begun is None:
            return "running" if time.time() - self.series.last_time < QUIET_S else "ended"
        ends = [event for event in self.events[begun:] if event.get("event") == "finish"]
        if ends:
            return str(ends[-1].get("status"))
        if self.start.get("host") != socket.gethostname():
            return "running" if time.time() - self._last_sign() < QUIET_S else "lost"
        return "running" if _is_alive(self.start) else "lost"

    def _last_sign(self) -> float:
        events = [event["time"] for event in self.events if isinstance(event.get("time"), int | float)]
        return max([self.series.last_time, *events[-1:]])


def _is_alive(start: dict[str, Any]) -> bool:
    """Whether the process that wrote a start event runs: a number alone may be another process's by now."""
    pid, begun = start.get("pid"), start.get("time")
    if not isinstance(pid, int) or not isinstance(begun, int | float):
        return False
    try:
        return psutil.Process(pid).create_time() <= begun + 1.0
    except (psutil.Error, ValueError, OverflowError):  # it is gone, or no process has such a number
        return False


class Library:
    """The runs in some directories.

    Args:
        directories: runs, or directories of runs.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._roots = [directory.resolve() for directory in directories]
        self._runs: dict[Path, Run] = {}
        self._scanned: float | None = None
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """Return the runs, in the order of the given directories and of their names."""
        with self._lock:
            if self._scanned is None or time.monotonic() - self._scanned > SCAN_AGAIN_S:
                found = {path: root for root in self._roots for path in _run_directories(root)}
                self._runs = {
                    path: self._runs.get(path) or Run(path, root) for path, root in list(found.items())[:MOST_RUNS]
                }
                self._scanned = time.monotonic()
            return list(self._runs.values())

    def find(self, run_id: str) -> Run | None:
        """Return the run of an id, refreshed; None where there is none."""
        run = next((run for run in self.runs() if run.id == run_id), None)
        if run is not None:
            run.refresh()
        return run


def _run_directories(root: Path) -> Iterator[Path]:
    """A given directory counts also before its run has written anything, if nothing below it is a run."""
    found = list(_below(root, root, DEPTH))
    yield from found or ([root] if root.is_dir() else [])


def _below(directory: Path, root: Path, depth: int) -> Iterator[Path]:
    if not is_inside(directory, root):
        return
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    if METRICS_FILE in names or EVENTS_FILE in names:
        yield directory
    if depth:
        for name in names:
            path = directory / name
            if not SKIPPED.fullmatch(name) and path.is_dir():
                yield from _below(path, root, depth - 1)
