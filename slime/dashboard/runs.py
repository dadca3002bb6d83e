"""Which runs there are in the given directories, what each has written so far, and where its time went.

A run is a directory with a metrics.jsonl. It says more of itself in run_events.jsonl (`RunEvents`);
a run without that file, written earlier or by something else, is shown from its metrics alone. So are its phases: a
record is written when what it tells of has ended.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from slime.observability.series import Lines, Series, finite, is_inside
from slime.processes.directories import EVENTS_FILE, METRICS_FILE

if TYPE_CHECKING:
    from slime.dashboard.records import Samples

EVAL_SAMPLES_FILE = "eval_samples.jsonl"
DIRECTORY = "rollouts"
NAME = re.compile(r"(eval_)?(\d{5,12})\.parquet")
TICK_NS = 2_000_000_000  # some file systems tell times apart by a second: what was changed since is looked at again
DEPTH = 3
MOST_RUNS = 500
LOOK_AGAIN_S = 0.5
SCAN_AGAIN_S = 5.0
# A run that says nothing of its process counts as running for as long after its last record.
QUIET_S = 300.0
SKIPPED = re.compile(r"iter_\d+|rollouts?|logs|profile|\..*")


@dataclass(frozen=True)
class SampleFile:
    """One file of samples.

    Attributes:
        name: without its ending: "00012" or "eval_00012".
        rollout_id: the rollout, or the step of an evaluation.
        is_eval: its samples are answers of an evaluation.
        path, size, changed: where it is, bytes, and when it was written.
        trainer_paths: what the trainer's ranks wrote about the same samples.
    """

    name: str
    rollout_id: int
    is_eval: bool
    path: Path
    size: int
    changed: float
    trainer_paths: tuple[Path, ...] = ()


class SampleFiles:
    """The files of samples of one run.

    Args:
        directory: of the run.
        root: files that lead out of it are left out.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory, self._root = directory / DIRECTORY, root
        self.files: dict[str, SampleFile] = {}
        self.version = 0
        self._changed: int | None = None  # when the directory was, if it was looked at long enough after that
        self._opened: OrderedDict[SampleFile, Samples] = OrderedDict()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Look which files there are, if the directory has changed: files come, and go, under whole names."""
        changed = changed_ns(self._directory)
        if changed is not None and changed == self._changed:
            return
        self._changed = changed if changed is not None and time.time_ns() - changed > TICK_NS else None
        paths = sorted(self._directory.glob("*.parquet")) if is_inside(self._directory, self._root) else []
        paths = [path for path in paths if is_inside(path, self._root)]
        found = {}
        for path in paths:
            if match := NAME.fullmatch(path.name):
                ranks = [other for other in paths if other.name.startswith(f"{path.stem}.train")]
                try:
                    status = path.stat()
                except OSError:  # removed meanwhile (--keep-rollouts)
                    continue
                sizes = path.stem, int(match[2]), bool(match[1]), path, status.st_size, status.st_mtime
                found[path.stem] = SampleFile(*sizes, tuple(ranks))
        if found != self.files:
            self.files = found
            self.version += 1

    def open(self, name: str) -> Samples:
        """Return the samples of a file.

        Raises:
            LookupError: there is no such file, or no longer.
            ValueError: it is no file of samples.
        """
        file = self.files.get(name)
        if file is None:
            raise LookupError(f"there are no samples {name} (--keep-rollouts says which are kept)")
        from slime.dashboard.records import Samples  # imports pyarrow

        with self._lock:
            if file not in self._opened:
                self._opened[file] = Samples(file)
                while len(self._opened) > 1:
                    self._opened.popitem(last=False)
            return self._opened[file]


def changed_ns(directory: Path) -> int | None:
    """Return when a directory was changed, in ns since 1970; None where there is none."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None


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
        self.series = Series(directory / METRICS_FILE, root)
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
            times = [event["time"] for event in self.events if isinstance(event.get("time"), int | float)]
            return "running" if time.time() - max([self.series.last_time, *times[-1:]]) < QUIET_S else "lost"
        return "running" if _is_alive(self.start) else "lost"


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


Span = dict[str, Any]
MOST_SPANS = 3000
PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs", "critic_values", "actor_train", "critic_train")
PARTS = ("rollout", *PASSES, "update_weights", "save_model", "other")
LENGTH, STEP = "rollout/response_len/mean", "perf/step_time"


def progress(run: Run) -> tuple[int, int | None]:
    """Return (rollouts done, rollouts of the whole run or None); a resumed run is where it is, not where it was."""
    steps = run.series.points.get(STEP) or run.series.points.get(LENGTH)
    done, time = (int(steps.step[-1]) + 1, steps.time[-1]) if steps else (0, 0.0)
    nothing: dict[str, Any] = {}
    plan = next((event for event in reversed(run.events) if event.get("event") == "plan"), nothing)
    first, begun = plan.get("first"), plan.get("time")
    if isinstance(first, int) and isinstance(begun, int | float) and begun > time:
        done = first
    total = plan.get("num_rollout", run.flags.get("num_rollout"))
    return done, total if isinstance(total, int) else None


def rollout_seconds(run: Run) -> list[float]:
    """Seconds from one finished rollout to the next, of the newest 20."""
    points = run.series.points.get(STEP) or run.series.points.get(LENGTH)
    times = list(points.time)[-21:] if points else []
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > earlier]


def phases(run: Run) -> Iterator[Span]:
    """The driver's phases, those that have not ended without an "end"; of one inside another both are there."""
    open_phases: list[Span] = []
    for event in run.events:
        kind, time = event.get("event"), event.get("time")
        if kind == "start":
            yield from (span | {"end": time} for span in open_phases)
            open_phases.clear()
        elif kind == "begin":
            open_phases.append({"name": str(event.get("phase")), "begin": time, "rollout": event.get("rollout")})
        elif kind in ("end", "finish") and open_phases:
            yield open_phases.pop() | {"end": time}
    yield from open_phases


def current_phase(run: Run) -> dict[str, Any] | None:
    """The phase that was begun last and has not ended."""
    still = [span for span in phases(run) if "end" not in span]
    return {"name": still[-1]["name"], "since": still[-1]["begin"]} if still else None


def time_page(run: Run) -> dict[str, Any]:
    """Everything of the page Time but the lanes of samples."""
    driver = [span for span in phases(run) if isinstance(span["begin"], int | float)][-MOST_SPANS:]
    lanes = {"driver": driver, "engines": list(_spans(run, "rollout")), "trainer": list(_training(run))}
    names = run.series.points
    return {
        "lanes": {name: spans[-MOST_SPANS:] for name, spans in lanes.items()},
        "gpus": gpus_of(run.flags),
        "steps": _steps(run),
        "idle": {
            "trainer": run.series.latest("perf/wait_time_ratio"),
            "engines": _idle(lanes["engines"]),
        },
        "engine_metrics": [
            name
            for name in names
            if name.startswith(("engine", "router", "rollout/engine_loads/", "perf/request", "perf/decode"))
        ]
        + [name for name in ("perf/tokens_per_gpu_per_sec", "rollout/prefix_cache_hit_rate") if name in names],
    }


def gpus_of(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return how many GPUs trainer and engines have; with --colocate they are the same ones.

    Example:
        >>> gpus_of({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 4})
        {'trainer': 16, 'engines': 4}
    """
    nodes, per_node, engines = (
        flags.get(name) for name in ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
    )
    found = {"trainer": nodes * per_node} if isinstance(nodes, int) and isinstance(per_node, int) else {}
    return found | ({"engines": engines} if isinstance(engines, int) else {})


def _spans(run: Run, part: str) -> Iterator[Span]:
    points = run.series.points.get(f"perf/{part}_time")
    if points:
        for step, time, seconds in zip(points.step, points.time, points.value, strict=True):
            if finite(seconds) is not None:
                yield {"name": part, "begin": time - seconds, "end": time, "rollout": step}


def _training(run: Run) -> Iterator[Span]:
    """The passes of a rollout, one after the other, which end when they are logged together."""
    by_step: dict[float, list[Span]] = {}
    for part in PASSES:
        for span in _spans(run, part):
            by_step.setdefault(span["rollout"], []).append(span)
    for spans in by_step.values():
        end = spans[-1]["end"]
        for span in reversed(spans):
            seconds = span["end"] - span["begin"]
            yield span | {"begin": end - seconds, "end": end}
            end -= seconds


def _idle(spans: list[Span]) -> float | None:
    """Share of the time of the newest 20 rollouts in which no engine generated."""
    newest = spans[-20:]
    if len(newest) < 2:
        return None
    whole = newest[-1]["end"] - newest[0]["begin"]
    busy = sum(span["end"] - span["begin"] for span in newest)
    return max(0.0, 1 - busy / whole) if whole > 0 else None


def _steps(run: Run) -> dict[str, Any]:
    """Seconds of each part of the newest 200 rollouts."""
    found = {part: run.series.select(f"perf/{part}_time") for part in (*PARTS, "step")}
    return {part: {"x": line["x"][-200:], "y": line["y"][-200:]} for part, line in found.items() if line["x"]}
