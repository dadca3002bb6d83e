"""A few answers of each evaluation to read: which ones, and the file to which they are appended.

The same prompts are taken at every evaluation, so that their answers can be followed through a run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from slime.utils.full_disk import line_of_full_disk
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class AppendedLines:
    """The file at `path`, made by the first line; a reader sees each line at once, and no part of one.

    Where the disk is full that is said once, and once how many lines were lost when there is room again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Append a line; its end is added.

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
            self._num_lost += 1
            return
        self._say_what_is_lost("it is written again")

    def finish(self) -> None:
        """No line follows."""
        self._say_what_is_lost("the disk was full until the end")

    def _append(self, content: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:  # a buffer would keep what found no room, for later
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


EVAL_SAMPLES_FILE = "eval_samples.jsonl"


class EvalSample(TypedDict):
    """One answer, as plain values."""

    data_set: str
    prompt: str | list[dict[str, Any]]
    response: str
    label: Any
    reward: float
    truncated: bool


class TextSink(Protocol):
    """A destination that can show text."""

    def write_eval_samples(self, shown: Sequence[EvalSample], step: int) -> None:
        """Take the answers of one evaluation; `step` is its "eval/step"."""


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


class EvalSamplesFile:
    """One JSON object an answer in `<output_dir>/eval_samples.jsonl`, with its "eval/step". It appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = AppendedLines(path)

    def write_eval_samples(self, shown: Sequence[EvalSample], step: int) -> None:
        """Append the answers."""
        for sample in shown:
            self._lines.write(json.dumps({"eval/step": step, **sample}, ensure_ascii=False, default=str))
