"""A few answers of each evaluation to read: which ones.

The same prompts are taken at every evaluation, so that their answers can be followed through a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from slime.utils.types import Sample


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
