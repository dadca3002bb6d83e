"""How far a tracker is in the files of a run, `<output_dir>/trackers/<name>.json`, and the lines behind that place.

The files are the queue between driver and trackers: whatever happens to a tracker, its lines wait there.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime.observability.trackers import ALARM_KEY, EVAL_SAMPLES_FILE, Step, Tracker
from slime.processes.directories import METRICS_FILE, whole_lines, write_private

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
