"""The quick start as a newcomer runs it, with fewer steps: seed 0 must gain 15 points (another estimator too: `slow`).

The full run, three seeds and the control that must not learn are benchmarks/quickstart.py; all estimators are
benchmarks/learning.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, log_tails

pytestmark = pytest.mark.timeout(2700)
SFT_STEPS, GRPO_STEPS = 280, 28
OTHER, OTHER_STEPS = "reinforce_plus_plus", 25


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Its output folder, and what it printed; run once."""
    output = tmp_path_factory.mktemp("quick_start")
    environment = {
        **os.environ,
        "OUTPUT": str(output),
        "SLIME_PYTHON": sys.executable,
        "SFT_STEPS": str(SFT_STEPS),
        "GRPO_STEPS": str(GRPO_STEPS),
    }
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", "scripts/run-tiny-cpu.sh"],
        cwd=ROOT,
        env=environment,
        timeout=2400,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(output / "grpo")
    return output, done


def test_grpo_alone_lifts_held_out_accuracy_by_fifteen_points(
    quick_start: tuple[Path, subprocess.CompletedProcess[str]],
):
    output, done = quick_start
    records = [json.loads(line) for line in (output / "grpo" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["eval/addition"] for record in records if "eval/addition" in record]
    assert accuracy[-1] - accuracy[0] >= 0.15, accuracy
    assert (output / "grpo" / "curves.png").stat().st_size > 10_000
    assert (output / "grpo" / "hf" / "config.json").is_file()
    assert "seconds per phase" in done.stdout and "after GRPO: 57+68=" in done.stdout


@pytest.mark.slow
def test_another_estimator_lifts_it_from_the_same_start(
    quick_start: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
):
    command = [
        sys.executable, "benchmarks/learning.py", "--start", quick_start[0], "--output", tmp_path,
        "--only", OTHER, "--seeds", 0, "--steps", OTHER_STEPS,
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        timeout=1200,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    # It fails unless the run gains 15 points.
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / f"{OTHER}-0")
    assert OTHER in (tmp_path / "table.md").read_text() and (tmp_path / "learning.png").is_file()
