"""The quick start as a newcomer runs it, with fewer GRPO steps: seed 0 must gain 15 points.

The full run, three seeds and the control that must not learn are benchmarks/quickstart.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, log_tails

pytestmark = pytest.mark.timeout(1200)
GRPO_STEPS = 26


def test_grpo_alone_lifts_held_out_accuracy_by_fifteen_points(tmp_path: Path):
    environment = {
        **os.environ,
        "OUTPUT": str(tmp_path),
        "SLIME_PYTHON": sys.executable,
        "GRPO_STEPS": str(GRPO_STEPS),
    }
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", "scripts/run-tiny-cpu.sh"],
        cwd=ROOT,
        env=environment,
        timeout=1100,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / "grpo")
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["eval/addition"] for record in records if "eval/addition" in record]
    assert accuracy[-1] - accuracy[0] >= 0.15, accuracy
    assert (tmp_path / "grpo" / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "grpo" / "hf" / "config.json").is_file()
    assert "seconds per phase" in done.stdout and "after GRPO: 57+68=" in done.stdout
