"""Commands run by a Python without slime's packages, and commands whose reader has had enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("driver", ["train.py", "train_async.py"])
def test_a_python_without_the_packages_is_told_where_they_come_from(driver: str) -> None:
    bare = [sys.executable, "-S", driver, "--help"]  # -S: without site-packages
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} has no package ") and "bash scripts/setup_env.sh" in line


def test_a_dump_whose_reader_leaves_early_ends_without_a_word(tmp_path: Path) -> None:
    sample = {"index": 0, "tokens": [1, 2, 3], "response_length": 2, "reward": 1.0}
    torch.save({"rollout_id": 0, "samples": [sample] * 20_000}, tmp_path / "0.pt")  # far more than a pipe holds
    command = [sys.executable, "tools/inspect_dump.py", str(tmp_path / "0.pt")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("sample 0: index 0")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 0
    process.stderr.close()
