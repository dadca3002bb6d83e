"""What the trackers share: their Protocol, which run of a service a run logs to, a few answers of each evaluation.

The driver writes metrics.jsonl and eval_samples.jsonl, and nothing else (`client` starts the writer process). The
writer (`writer`) reads these files and hands their lines to the trackers; no tracker runs in the driver.

A run that goes on from its own checkpoint goes on in them; one that begins, or goes on from another run's checkpoint,
gets its own. The answers are those of the same prompts at every evaluation, so they can be followed through a run.

How far a tracker is in the files of a run is in `<output_dir>/trackers/<name>.json`. The files are the queue between
driver and trackers: whatever happens to a tracker, its lines wait there.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict

from slime.checkpoints.paths import latest_iteration
from slime.config.args import Args
from slime.plugins import TRACKERS
from slime.processes.directories import METRICS_FILE, whole_lines, write_private
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
FILE = "trackers.json"
EVAL_SAMPLES_FILE = "eval_samples.jsonl"
ALARM_KEY = "alarm"
ROOM = 1 << 20  # bytes


class TrackerRuns:
    """Those of one run.

    Args:
        save: directory of --save, None where nothing is kept.
        goes_on: the run goes on from a checkpoint there.
    """

    def __init__(self, save: str | None, *, goes_on: bool) -> None:
        self._path = None if save is None else Path(save) / FILE
        self._lock = threading.Lock()  # each tracker has a thread of its own
        self._known: dict[str, str] = _read(self._path) if goes_on and self._path is not None else {}

    def known(self, name: str) -> str | None:
        """What the run before has logged to; None where it has not, or this one begins."""
        return self._known.get(name)

    def keep(self, name: str, value: str) -> None:
        """Say what this run logs to."""
        with self._lock:
            if self._path is None or self._known.get(name) == value:
                return
            self._known[name] = value
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f".{FILE}.partial")
            partial.write_text(json.dumps(self._known, indent=2) + "\n")
            os.replace(partial, self._path)


def goes_on(args: Args) -> bool:
    """Whether the run of these flags goes on from its own checkpoint (reads `save`, `load`, `finetune`)."""
    is_own = args.save is not None and args.load == args.save and not args.finetune
    return is_own and latest_iteration(args.load) is not None


class Step(NamedTuple):
    """When a record was made.

    Attributes:
        key: what is counted: "train/step", "rollout/step" or "eval/step".
        number: of the step.
        time_s: seconds since the epoch.
    """

    key: str
    number: int
    time_s: float


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.

    Attributes:
        directory: --output-dir.
        known: what `keep` was given before, by this run or the one that it goes on from; None where it begins.
        keep: notes the service's name of this run, so that the tracker finds it again.
        command_line: of the driver, secrets hidden.
    """

    directory: Path
    known: str | None = None
    keep: Callable[[str], None] = lambda value: None
    command_line: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of the output directory."""
        return self.directory.resolve().name


class Tracker(Protocol):
    """A service that shows metrics, made by `Class(args)` in the writer process, and used by one thread at a time.

    A call that raises or takes too long is made again later, from a new object: what it did must do no harm twice. A
    TypeError, ValueError, LookupError or AttributeError means that this record will never do; it is left out.

    A library that writes files from a thread of its own has them in `directory`, an attribute that is looked at where
    there is one: while that disk has no room, nothing counts as taken.
    """

    def open(self, config: Mapping[str, Any], run: TrackedRun) -> str | None:
        """Begin the run, or go on with it; return where it is seen (an address or a directory), if there is a place.

        Args:
            config: every flag, secrets hidden.
            run: which run it is.
        """

    def log(self, metrics: Mapping[str, float], step: Step) -> None:
        """Take a record; `metrics[step.key]` is its step."""

    def log_samples(self, samples: Sequence[EvalSample], step: Step) -> None:
        """Take answers of one evaluation (--log-eval-samples)."""

    def log_alarm(self, alarm: Mapping[str, Any], step: Step) -> None:
        """Take an alarm; `alarm["what"]` says what is wrong, and the step is that of the record before it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End; `summary["status"]` is "finished", "failed", or "crashed" where the driver is gone."""


CLASSES = {
    "wandb": "slime.observability.wandb_utils:WandbAdapter",
    "tensorboard": "slime.observability.trackers.services:_TensorboardAdapter",
    "mlflow": "slime.observability.trackers.services:MlflowTracker",
    "swanlab": "slime.observability.trackers.services:SwanlabTracker",
    "trackio": "slime.observability.trackers.services:TrackioTracker",
}


def trackers_of(args: Args) -> list[str]:
    """Names of the trackers that the flags ask for."""
    asked = [name for name in ("wandb", "tensorboard") if vars(args)[f"use_{name}"]]
    return list(dict.fromkeys([*asked, *(name for name in args.tracker if name != "jsonl")]))


def need_room(directory: str | Path) -> None:
    """Check that a file system has room: a library that writes from a thread of its own tells nobody of a full one.

    Raises:
        OSError: it is full, or there is no such directory.
    """
    found = os.statvfs(directory)
    if found.f_bavail * found.f_frsize < ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def make_tracker(name: str, args: Args) -> Tracker:
    """Make one by its name, that of a row of an installed package, or its path "module:Class"."""
    if name in CLASSES:
        make = load_function(CLASSES[name])
    else:
        make = TRACKERS[name] if name in TRACKERS else load_function(name)
    tracker: Tracker = make(args)
    return tracker


def _read(path: Path) -> dict[str, str]:
    """What is kept; a file that cannot be read costs a new run of the tracker, not this run."""
    try:
        found = json.loads(path.read_text())
        return {str(name): str(value) for name, value in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): metrics go to new runs of the trackers", path, error)
        return {}


class EvalSample(TypedDict):
    """One answer, as plain values."""

    data_set: str
    prompt: str | list[dict[str, Any]]
    response: str
    label: Any
    reward: float
    truncated: bool


def pick_eval_samples(data: Mapping[str, Mapping[str, Any]], num_prompts: int) -> list[EvalSample]:
    """The first answer to each of the first `num_prompts` prompts of every data set.

    Args:
        data: per data set `{"rewards": list[float], "samples": list[Sample]}`; one without samples has none to show.
        num_prompts: prompts of each data set.
    """
    shown: list[EvalSample] = []
    for name, result in data.items():
        first: dict[int, EvalSample] = {}
        for position, sample in enumerate(result.get("samples") or []):
            prompt_id = position if sample.group_index is None else sample.group_index
            if prompt_id not in first and len(first) < num_prompts:
                first[prompt_id] = _plain(name, sample, float(result["rewards"][position]))
        shown += first.values()
    return shown


def _plain(name: str, sample: Sample, reward: float) -> EvalSample:
    return {
        "data_set": name,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": reward,
        "truncated": sample.status is Sample.Status.TRUNCATED,
    }


def text_of(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as one text: message lists as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def alarm_text(alarm: Mapping[str, Any]) -> str:
    """An alarm as lines of "name: value"."""
    return "\n".join(f"{name}: {value}" for name, value in alarm.items())


FOLDER = "trackers"
RUN_FILE = "run.json"
BATCH = 500  # lines between two notes of the place
DELIVER_S = 30.0  # for what is left when the run has ended
FINISH_S = 30.0  # for `Tracker.finish`, if the tracker has no `finish_s` of its own
KEYS = {"wandb": "wandb_run_id", "tensorboard": "tensorboard_dir"}  # names in trackers.json
FILES = (METRICS_FILE, EVAL_SAMPLES_FILE)


@dataclass
class Place:
    """Where a tracker is.

    Attributes:
        run: the service's name of the run; None before the tracker has opened it.
        records: bytes of metrics.jsonl that the tracker has.
        answers: bytes of eval_samples.jsonl that it has.
        num_refused: lines that it could not take and that were left out.
    """

    run: str | None = None
    records: int = 0
    answers: int = 0
    num_refused: int = 0

    def write(self, directory: Path, name: str) -> None:
        """Note it.

        Raises:
            OSError: it cannot be written.
        """
        write_json(path_of(directory, name), asdict(self))


@dataclass(frozen=True)
class Item:
    """A line of a file, or the answers of one evaluation, with the place behind it."""

    file: str
    end: int
    value: Any

    def hand_to(self, tracker: Tracker, step: Step) -> None:
        """Give it to a tracker.

        Args:
            tracker: which takes it.
            step: of the record before; an alarm has none of its own.
        """
        if self.file == EVAL_SAMPLES_FILE:
            number = int(self.value[0]["eval/step"])
            samples = [{name: value for name, value in row.items() if name != "eval/step"} for row in self.value]
            tracker.log_samples(samples, Step("eval/step", number, step.time_s))  # type: ignore[arg-type]
        elif ALARM_KEY in self.value:
            tracker.log_alarm(self.value[ALARM_KEY], step)
        else:
            tracker.log(metrics_of(self.value), step)

    def step(self, before: Step) -> Step:
        """The step of a record; that of the record before for what has none."""
        if self.file == EVAL_SAMPLES_FILE or ALARM_KEY in self.value:
            return before
        key = self.value["step_key"]
        return Step(key, int(self.value[key]), float(self.value["time"]))


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line; null stands for what is not finite.

    Example:
        >>> metrics_of({"step_key": "train/step", "time": 7.0, "train/step": 3, "train/loss": None})
        {'train/step': 3, 'train/loss': nan}
    """
    values = {name: math.nan if value is None else value for name, value in record.items()}
    return {name: value for name, value in values.items() if name not in ("step_key", "time")}


def path_of(directory: Path, name: str) -> Path:
    """Return the file that says where a tracker is."""
    return directory / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"


def read_place(directory: Path, name: str) -> Place | None:
    """Return where a tracker is; None where nothing says so."""
    try:
        return Place(**json.loads(path_of(directory, name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def end_of_files(directory: Path) -> tuple[int, int]:
    """Return the sizes of metrics.jsonl and eval_samples.jsonl."""
    records, answers = (size_of(directory / file) for file in FILES)
    return records, answers


def size_of(path: Path) -> int:
    """Return the size of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def news(directory: Path, place: Place, *, answers_end: int) -> Iterator[Item]:
    """Yield what a tracker does not have yet, at most `BATCH` lines of metrics.jsonl.

    Args:
        directory: --output-dir.
        place: of the tracker.
        answers_end: bytes of eval_samples.jsonl that are whole evaluations.
    """
    for count, (end, value) in enumerate(whole_lines(directory / METRICS_FILE, place.records)):
        if count == BATCH:
            return
        yield Item(METRICS_FILE, end, value)
    group: list[Any] = []
    last = place.answers
    for end, value in whole_lines(directory / EVAL_SAMPLES_FILE, place.answers):
        if end > answers_end:
            break
        if group and isinstance(value, dict) and value.get("eval/step") != group[0].get("eval/step"):
            yield Item(EVAL_SAMPLES_FILE, last, group)
            group = []
        group, last = [*group, value] if isinstance(value, dict) else group, end
    if group:
        yield Item(EVAL_SAMPLES_FILE, last, group)


def count_left(directory: Path, name: str) -> int:
    """Return how many lines a tracker does not have yet."""
    place = read_place(directory, name) or Place()
    starts = zip(FILES, (place.records, place.answers), strict=True)
    return sum(1 for file, start in starts for _ in whole_lines(directory / file, start))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is whole at any moment, and that only this user can read: flags are in it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    write_private(partial, json.dumps(value, default=str) + "\n")
    os.replace(partial, path)
