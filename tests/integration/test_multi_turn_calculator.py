"""The calculator example as a newcomer runs it: a tiny model learns to call a real tool, on real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, log_tails

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_grpo_teaches_the_model_to_call_the_calculator(tmp_path: Path):
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SLIME_PYTHON": sys.executable, "GRPO_STEPS": "12"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", "examples/multi_turn_calculator/run-multi-turn-calculator.sh"],
        cwd=ROOT,
        env=environment,
        timeout=1700,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / "grpo")
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval/products" in record]
    accuracy = [record["eval/products"] for record in evaluations]
    called = [record["eval/products/multi_turn/tool_call_rate"] for record in evaluations]
    assert accuracy[-1] - accuracy[0] >= 0.2, accuracy
    assert called[-1] - called[0] >= 0.1, called
    assert "GRPO alone:" in done.stdout
