"""The runs of examples/troubleshooting: rewards have the fault that they name, and curves are drawn from files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from examples.troubleshooting import plot, rewards
from slime.config.parse import CommandLine
from slime.utils.types import Sample

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/troubleshooting/run-troubleshooting-cpu.sh"


def test_each_reward_has_the_fault_that_its_name_says() -> None:
    args = Namespace(rollout_max_response_len=64)
    right = Sample(response="125<|im_end|>", label="125", response_length=4)
    seven = Sample(response="7<|im_end|>", label="125", response_length=2)
    assert [asyncio.run(rewards.sevens(args, sample)) for sample in (right, seven)] == [0.0, 1.0]
    assert [asyncio.run(rewards.long(args, sample)) for sample in (right, seven)] == [4 / 64, 2 / 64]
    assert [asyncio.run(rewards.blocking(args, sample)) for sample in (right, seven)] == [1.0, 0.0]


def test_a_symptom_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "flat", "flatter"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "'flatter'" in done.stderr and "entropy" in done.stderr


def test_every_flag_of_the_runs_exists() -> None:
    known = {option for action in CommandLine().parser._actions for option in action.option_strings}
    runs = SCRIPT.read_text().partition("run() {")[2].partition("plot.py")[0]
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", runs)) - known - {"--dry-run"} == set()


def test_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    for name, values in {"entropy": [0.7, 0.01], "healthy": [0.7, 0.6]}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"train/entropy_loss": value}) for value in values]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert plot.curve(tmp_path / "entropy", "train/entropy_loss") == [0.7, 0.01]
    command = [sys.executable, str(ROOT / "examples/troubleshooting/plot.py"), "--runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--output", str(tmp_path)], env=environment, capture_output=True, timeout=100)
    assert done.returncode == 0 and [path.name for path in tmp_path.glob("*.png")] == ["entropy.png"]
