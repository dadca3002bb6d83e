"""The distillation example: rewards that are only logged, and its summary."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from examples.on_policy_distillation import summarize
from examples.on_policy_distillation.reward import only_logged
from slime.utils.types import Sample


def test_rewards_are_logged_and_not_trained_on() -> None:
    assert only_logged(Namespace(reward_key=None), [Sample(reward=1.0), Sample(reward=0)]) == ([1.0, 0.0], [0.0, 0.0])


def test_the_summary_compares_student_and_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, *records: dict[str, float]) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    run = write(
        "opd",
        {"eval/addition": 0.5},
        {"rollout/opd_reverse_kl": 0.3},
        {"rollout/opd_reverse_kl": 0.1},
        {"eval/addition": 0.9},
    )
    teacher = write("grpo", {"eval/addition": 0.5}, {"eval/addition": 0.95})
    monkeypatch.setattr(sys, "argv", ["summarize.py", "--run", run, "--teacher", teacher])
    summarize.main()
    said = capsys.readouterr().out
    assert "student 50.0% -> 90.0%, teacher 95.0%" in said and "0.3000 -> 0.1000" in said
