"""Where metric records go: the console and metrics.jsonl; what a run says of itself; and the format of log lines.

Answers of evaluations go to eval_samples.jsonl. Trackers read both files in a process of their own (`trackers`).

One process writes (the driver: `init_tracking(args)`); in every other process `log` only collects, and the records
travel to the driver with the results (`take_pending`). `log_of_user` is what users call as `slime.log`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.config.alarm_settings import alarm_settings
from slime.config.args import Args
from slime.observability.alarms import AlarmWatch
from slime.observability.console import ConsoleSink, write_curves
from slime.observability.trackers import ALARM_KEY, EVAL_SAMPLES_FILE, EvalSample, trackers_of
from slime.observability.trackers.client import TrackerWriter
from slime.processes.directories import EVENTS_FILE, METRICS_FILE, PRIVATE
from slime.utils.errors import is_of_full_disk, line_of_full_disk
from slime.utils.http.api_keys import without_secrets

STEP_KEY = "rollout/step"
RESERVED = ("step_key", "time", STEP_KEY)  # Names that a line of metrics.jsonl has anyway


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


logger = logging.getLogger(__name__)

MetricRecord = tuple[dict[str, float], str]
CURVES_FILE = "curves.png"


def configure_logger(prefix: str = "") -> None:
    """Send log lines of this process to stderr, with the time and `prefix` (for example "rollout manager")."""
    label = f" {prefix}" if prefix else ""
    logging.basicConfig(
        level=logging.INFO,
        format=f"[%(asctime)s{label}] %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        # It writes to what is stderr at that moment: bars on a terminal take its place for a while.
        handlers=[logging._StderrHandler()],  # type: ignore[attr-defined]
        force=True,
    )


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """The warnings that slime logs in a block, as sentences: for a user who does not see this process's log."""
    collected: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: collected.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger("slime")
    root.addHandler(handler)
    try:
        yield collected
    finally:
        root.removeHandler(handler)


class AppendedLines:
    """The file at `path`, made by the first line; a reader sees each line at once, and no part of one.

    Where the disk is full that is said once, and once how many lines were lost when there is room again.

    Args:
        path: the file.
        mode: of a file that is made; the umask takes more away.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        self._path, self._mode = path, mode
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Append a line, or several that belong together; the last end of line is added.

        Raises:
            OSError: it cannot be written, and not for want of room.
        """
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            if (problem := line_of_full_disk(error)) is None:
                raise
            if self._num_lost == 0:
                logger.error("%s cannot be written (%s); the run goes on without its lines", self._path, problem)
            self._num_lost += 1 + line.count("\n")
            return
        self._say_what_is_lost("it is written again")

    def finish(self) -> None:
        """No line follows."""
        self._say_what_is_lost("the disk was full until the end")

    def _append(self, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(
            os.open(self._path, flags, self._mode), "ab", buffering=0
        ) as file:  # a buffer would keep what found no room, for later
            size = os.fstat(file.fileno()).st_size
            left = memoryview(content)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                if os.fstat(file.fileno()).st_size > size:
                    os.ftruncate(file.fileno(), size)  # no half line stays
                raise

    def _say_what_is_lost(self, now: str) -> None:
        if self._num_lost:
            logger.error("%s lacks %d lines for which there was no room; %s", self._path, self._num_lost, now)
        self._num_lost = 0


class JsonlSink:
    """One JSON object a line: records in `<output_dir>/metrics.jsonl`, answers in `eval_samples.jsonl` next to it.

    Records have "step_key" and "time" added, answers their "eval/step". An alarm is a line of metrics.jsonl of its
    rollout, or with the "step_key" "alarm" of none; its values are under "alarm". The sink appends, so a resumed run
    goes on in its files; a full disk costs lines, not the run. A value that is not finite becomes null: JSON has no
    NaN.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / METRICS_FILE).touch()
        self._records = AppendedLines(directory / METRICS_FILE)
        self._answers = AppendedLines(directory / EVAL_SAMPLES_FILE)

    def write(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Append the record; a reader sees it at once."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._records.write(json.dumps({"step_key": step_key, "time": time.time(), **values}))

    def write_eval_samples(self, shown: Sequence[EvalSample], step: int) -> None:
        """Append the answers."""
        rows = [json.dumps({"eval/step": step, **sample}, ensure_ascii=False, default=str) for sample in shown]
        self._answers.write("\n".join(rows))

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Append the alarm."""
        place = {"step_key": STEP_KEY, STEP_KEY: alarm["step"]} if "step" in alarm else {"step_key": ALARM_KEY}
        line = place | {"time": time.time(), ALARM_KEY: dict(alarm)}
        self._records.write(json.dumps(line, ensure_ascii=False, default=str))

    def finish(self) -> None:
        """Say how many lines are lost, if any are."""
        self._records.finish()
        self._answers.finish()


class RunEvents:
    """run_events.jsonl: what a run says of itself, for pages that are looked at while it runs and after it crashed.

    One line an event, appended by the driver: "start" (command, flags, process), "plan" (the rollouts to do; again
    after a restart), "begin" and "end" of each phase, and "finish" (how it ended).

    Args:
        directory: --output-dir.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = AppendedLines(directory / EVENTS_FILE, mode=PRIVATE)

    def write(self, event: str, **values: Any) -> None:
        """Append an event; what is no JSON becomes its text."""
        self._lines.write(json.dumps({"event": event, "time": time.time(), **values}, default=str))

    def start(self, command: str, resume: str | None, flags: Mapping[str, Any]) -> None:
        """Say what is started.

        Args:
            command: as it was given, without secrets.
            resume: the command that goes on with the run; None where nothing of it is saved.
            flags: the parsed ones; the values of secret ones are hidden.
        """
        shown = without_secrets(flags)
        host, pid = socket.gethostname(), os.getpid()
        self.write("start", command=command, resume=resume, host=host, pid=pid, flags=shown)


class _Tracking:
    """The owner of what this process writes to, and of what it collected for another process."""

    def __init__(self) -> None:
        self.args: Args | None = None
        self.console: ConsoleSink | None = None
        self.lines: JsonlSink | None = None
        self.writer: TrackerWriter | None = None
        self.alarms: AlarmWatch | None = None
        self.pending: list[MetricRecord] = []
        self.is_collected = False  # whether another process takes what is pending
        self.of_users = UserMetrics()
        self.has_warned = False
        self.taking = threading.Lock()
        self.writing = threading.Lock()  # a driver's own threads may log


tracking = _Tracking()


def init_tracking(args: Args, primary: bool = True) -> None:
    """Open console and files (`primary`) or make this process one that only collects.

    Args:
        args: reads `output_dir`, `tracker`, `use_tensorboard`, `use_wandb` and the flags of those two, and what says
            whether the run goes on (`trackers.goes_on`).
        primary: True in the one process that writes.
    """
    if primary and tracking.args is not None and tracking.args.output_dir == args.output_dir:
        return  # a driver of the user's own asks again
    finish_tracking()
    tracking.is_collected = not primary
    if not primary:
        return
    names = trackers_of(args)
    tracking.writer = TrackerWriter(args, names) if names else None
    tracking.args, tracking.console, tracking.lines = args, ConsoleSink(), JsonlSink(Path(args.output_dir))
    settings = alarm_settings(args.alarms_config)
    tracking.alarms = None if settings is None else AlarmWatch(settings)


def log(args: Args, metrics: Mapping[str, Any], step_key: str) -> None:
    """Write one record, or collect it in a process that does not write.

    Args:
        args: the run's flags.
        metrics: name -> number (tensors and arrays of one element are converted); must contain `step_key`.
        step_key: the name of the step, "train/step", "rollout/step" or "eval/step".

    Raises:
        ValueError: `step_key` is missing, or a value is no number.
    """
    if step_key not in metrics:
        raise ValueError(f"a metric record needs its step {step_key!r}; it has {sorted(metrics)}")
    values = numbers(metrics)
    if tracking.console is None or tracking.lines is None:
        tracking.pending.append((values, step_key))
        return
    with tracking.writing:
        tracking.console.write(values, step_key)
        tracking.lines.write(values, step_key)
        if tracking.alarms is not None:
            tracking.alarms.note(values, step_key)


def log_of_user(metrics: Mapping[str, Any], step: int) -> None:
    """Write a user's numbers at a rollout's step, or average them until this process's next records are taken.

    In a process of which nobody takes records, they are left out with a warning.

    Args:
        metrics: name -> number (tensors and arrays of one element are converted).
        step: the rollout.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the step is negative, a name is taken, or a value is no number.
    """
    check_record(metrics, step)
    values = numbers(metrics)
    if tracking.args is not None:
        log(tracking.args, {**values, STEP_KEY: step}, STEP_KEY)
    elif tracking.is_collected:
        tracking.of_users.add(values, step)
    elif not tracking.has_warned:
        tracking.has_warned = True
        logger.warning("slime.log leaves %s out: only the driver and the rollout manager log", ", ".join(metrics))


def begin_rollouts(last_id: int) -> None:
    """Have the console count time from now on: the rollouts up to `last_id` follow."""
    if tracking.console is not None:
        tracking.console.begin(last_id)


def end_rollout(rollout_id: int) -> None:
    """Have the console show a rollout, whose records are all logged, and log the alarms that begin or end with it."""
    if tracking.console is not None:
        tracking.console.end_rollout(rollout_id)
    if tracking.alarms is not None:
        for alarm in tracking.alarms.changes(rollout_id):
            log_alarm(alarm)


def log_eval_samples(shown: Sequence[EvalSample], step: int) -> None:
    """Write answers of one evaluation, in the process that writes.

    Args:
        shown: see `slime.observability.trackers.pick_eval_samples`; with none nothing is written.
        step: value of "eval/step".
    """
    if shown and tracking.lines is not None:
        tracking.lines.write_eval_samples(shown, step)


def log_alarm(alarm: Mapping[str, Any]) -> None:
    """Write an alarm, in the process that writes.

    Args:
        alarm: plain values; `alarm["what"]` says what is wrong in one sentence.
    """
    with tracking.writing:
        if tracking.console is not None and tracking.lines is not None:
            tracking.console.write_alarm(alarm)
            tracking.lines.write_alarm(alarm)


def take_pending() -> list[MetricRecord]:
    """The records collected since the last call, for the process that writes."""
    with tracking.taking:  # a rollout and an evaluation may end at once: nothing is lost or given out twice
        of_users: list[MetricRecord] = [(record, STEP_KEY) for record in tracking.of_users.take()]
        taken = list(tracking.pending)
        del tracking.pending[: len(taken)]
    return of_users + taken  # the console ends a line with the rollout's own record


def finish_tracking(args: Args | None = None, *, failed: bool = False) -> None:
    """Close the files and draw `<output_dir>/curves.png`; does nothing in a process that only collects.

    Args:
        args: unused, because `init_tracking` kept them; part of the public signature.
        failed: what trackers say of the run.
    """
    args, lines, writer = tracking.args, tracking.lines, tracking.writer
    tracking.args = tracking.lines = tracking.console = tracking.writer = tracking.alarms = None
    if args is None or lines is None:
        return
    lines.finish()
    if writer is not None:
        writer.finish(failed=failed)
    directory = Path(args.output_dir)
    try:
        if write_curves(directory / METRICS_FILE, directory / CURVES_FILE):
            logger.info("curves of this run: %s", directory / CURVES_FILE)
    except OSError as error:
        if not is_of_full_disk(error):
            raise
        logger.error("no curves.png: %s", error)
    except ImportError as error:
        logger.warning("no curves.png: %s (pip install matplotlib); the numbers are in %s", error, METRICS_FILE)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers.

    Raises:
        ValueError: a value is no number.
    """
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"metric {name!r} is no number: {value!r}")
    return int(value) if isinstance(value, bool) else value
