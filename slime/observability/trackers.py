"""What the trackers share: which run of W&B and which directory of TensorBoard a run logs to, and a few answers of
each evaluation to read.

A run that goes on from its own checkpoint goes on in them; one that begins, or goes on from another run's checkpoint,
gets its own. The answers are those of the same prompts at every evaluation, so they can be followed through a run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from slime.checkpoints.paths import latest_iteration
from slime.config.args import Args
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
FILE = "trackers.json"
WANDB_RUN, TENSORBOARD_DIR = "wandb_run_id", "tensorboard_dir"


class TrackerRuns:
    """Those of one run.

    Args:
        save: directory of --save, None where nothing is kept.
        goes_on: the run goes on from a checkpoint there.
    """

    def __init__(self, save: str | None, *, goes_on: bool) -> None:
        self._path = None if save is None else Path(save) / FILE
        self._known: dict[str, str] = _read(self._path) if goes_on and self._path is not None else {}

    def known(self, name: str) -> str | None:
        """What the run before has logged to; None where it has not, or this one begins."""
        return self._known.get(name)

    def keep(self, name: str, value: str) -> None:
        """Say what this run logs to."""
        if self._path is None or self._known.get(name) == value:
            return
        self._known[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{FILE}.partial")
        partial.write_text(json.dumps(self._known, indent=2) + "\n")
        os.replace(partial, self._path)


def tracker_runs(args: Args) -> TrackerRuns:
    """Those of the run of these flags (reads `save`, `load`, `finetune`)."""
    goes_on = args.save is not None and args.load == args.save and not args.finetune
    return TrackerRuns(args.save, goes_on=goes_on and latest_iteration(args.load) is not None)


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
