"""Helpers of the tiny runs of all examples: the control, and the curve of a run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from examples import tiny
from slime.utils.types import Sample


def test_the_control_gives_samples_the_rewards_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(values: list[float], count: int) -> list[float]:
        assert count == len(values)
        return values[::-1]

    monkeypatch.setattr(tiny.random, "sample", reverse)
    samples = [Sample(index=i, group_index=i // 2, reward=reward) for i, reward in enumerate([1.0, 1.0, 0.0, 1.0])]
    raw, given = tiny.permuted(Namespace(reward_key=None), samples)
    # Reversed, the groups have 1, 0 and 1, 1: mean 0.5 and deviation sqrt(0.5), then nothing to learn.
    assert raw == [1.0, 1.0, 0.0, 1.0]
    assert given == pytest.approx([0.5 / 0.5**0.5, -0.5 / 0.5**0.5, 0.0, 0.0], abs=1e-5)


def test_the_curve_of_a_run_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[str, Any]] = [
        {"eval/step": 0, "eval/bugs": 0.25, "eval/bugs/response_len/mean": 3, "eval/bugs-truncated_ratio": 0},
        {"rollout/raw_reward": 0.125, "rollout/step": 0},
        {"train/train_rollout_logprob_abs_diff": 2e-7},
        {"rollout/raw_reward": 0.5, "rollout/step": 1},
        {"train/train_rollout_logprob_abs_diff": 1e-7},
        {"eval/step": 1, "eval/bugs": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(sys, "argv", ["tiny.py", str(tmp_path)])
    tiny.main()
    assert capsys.readouterr().out.splitlines() == [
        "eval/bugs: 25.0% -> 75.0% (+50.0 points)",
        "reward in training: 0.12, 0.50",
        "log-probs of engine and trainer differ by 1.0e-07 to 2.0e-07 (means of steps)",
    ]
