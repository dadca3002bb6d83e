"""A run whose driver is killed at a random moment and whose line is started again is the run that was never stopped.

20 rows: ten moments for train.py, and for train_async.py with the default and the fully async rollout in turn. Most of
so short a run is its start: one half of the moments is anywhere in it, the other within a random rollout. Each takes
about a minute; what was done is in `interrupted.jsonl` below SLIME_CHAOS_DIR (if that is set), and rows that are there
for this revision are not done again:

    SLIME_CHAOS_DIR=/somewhere python -m pytest -m slow tests/chaos/test_interrupted_runs.py [-k "fully_async and 3"]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.rollout_files import load_dump
from slime.processes.wait import wait
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOTAL = 6
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SCHEDULES: dict[str, tuple[str, list[Any]]] = {
    "train": ("train.py", ["--save-interval", 1]),
    # Two rollouts between checkpoints: the second one is generated ahead, with older weights.
    "train_async": ("train_async.py", ["--save-interval", 2]),
    "fully_async": (
        "train_async.py",
        ["--save-interval", 2, "--rollout-function-path", FULLY_ASYNC, "--max-weight-staleness", 1],
    ),
}
"""Name -> (driver, its flags)."""
ROWS = [
    *(("train", number) for number in range(10)),
    *(("train_async" if number % 2 else "fully_async", number) for number in range(10)),
]
EXACT_COLUMNS = ("train/loss", "train/pg_loss", "train/grad_norm", "train/ppo_kl", "train/lr-pg_0")
SAMPLE_FIELDS = ("index", "prompt", "tokens", "reward", "loss_mask")
LEAVE_S, START_S = 30.0, 300.0
ROLLOUT_S = 0.5
"""About what one takes, with its train step, sync and checkpoint."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("SLIME_CHAOS_DIR")
    path = Path(given) / revision() if given else tmp_path_factory.mktemp("chaos")
    path.mkdir(parents=True, exist_ok=True)
    return path


def revision() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"


@pytest.fixture(scope="module")
def flags(work: Path) -> list[Any]:
    model, prompts = work / "model", work / "prompts.jsonl"
    if not prompts.exists():
        make_model(model)
        write_prompts(prompts, count=16)
    return [
        *grpo_flags(model, prompts), "--rollout-num-gpus", 1, "--rollout-shuffle", "--deterministic",
        "--lr-decay-style", "cosine", "--lr-decay-iters", TOTAL, "--lr-warmup-iters", 1,
        "--num-rollout", TOTAL, "--resume", "auto",
    ]  # fmt: skip


def line_of(out: Path, flags: list[Any], schedule: str) -> list[Any]:
    """What a run adds to the flags; the same when it is started again."""
    saved = ["--save", out, "--save-hf", out / "hf", "--save-debug-rollout-data", out / "dump" / "{rollout_id}.pt"]
    return [*flags, *saved, *SCHEDULES[schedule][1]]


@pytest.fixture(scope="module")
def straight(work: Path, flags: list[Any]) -> dict[str, tuple[Run, float]]:
    """Of each schedule: the run that nothing interrupts, and how long it takes; made when it is asked for."""

    class Straight(dict[str, tuple[Run, float]]):
        def __missing__(self, schedule: str) -> tuple[Run, float]:
            out, note = work / f"straight_{schedule}", work / f"straight_{schedule}.json"
            if not note.exists():
                begin = time.monotonic()
                train(out, *line_of(out, flags, schedule), script=SCHEDULES[schedule][0])
                note.write_text(json.dumps(time.monotonic() - begin))
            self[schedule] = (Run(out, 0, ""), float(note.read_text()))
            return self[schedule]

    return Straight()


@pytest.mark.parametrize(("schedule", "number"), ROWS)
def test_a_run_that_is_killed_at_a_random_moment_goes_on_as_if_it_was_not(
    work: Path, flags: list[Any], straight: dict[str, tuple[Run, float]], schedule: str, number: int
) -> None:
    table, name = work / "interrupted.jsonl", f"{schedule}-{number}"
    rows = [json.loads(row) for row in table.read_text().splitlines()] if table.exists() else []
    if any(row["name"] == name for row in rows):
        pytest.skip(f"done: {table}")
    expected, duration_s = straight[schedule]
    out, begin, chance = work / name, time.monotonic(), random.Random(name)
    # train_async takes the odd numbers and fully_async the even ones
    rollouts, seconds = 0, chance.uniform(1.0, duration_s)
    if number % 4 < 2:
        rollouts, seconds = chance.randrange(1, TOTAL), chance.uniform(0.0, ROLLOUT_S)
    line, script = line_of(out, flags, schedule), SCHEDULES[schedule][0]
    killed_after_s = kill_after(rollouts, seconds, out, line, script)
    rollouts_then = rollouts_of(out)
    resumed = train(out, *line, script=script)
    assert_equal(expected, resumed)
    row = {"name": name, "killed_after_s": killed_after_s, "rollouts_then": rollouts_then, "equal": True}
    with table.open("a") as file:
        file.write(json.dumps({**row, "row_s": time.monotonic() - begin}) + "\n")


def rollouts_of(out: Path) -> int:
    """How many a run has trained on so far."""
    file = out / "metrics.jsonl"
    complete, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")
    records = map(json.loads, complete.splitlines())
    return len({record["train/step"] for record in records if record["step_key"] == "train/step"})


def kill_after(rollouts: int, seconds: float, out: Path, line: list[Any], script: str) -> float:
    """Start a run, and kill its driver as the kernel would so many seconds after a rollout (0: after the start).

    Returns when nothing of it is left that writes: seconds from the start to the kill.
    """
    command = [sys.executable, str(ROOT / script), "--output-dir", str(out), *map(str, line)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with (out / "killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            there = lambda: process.poll() is not None or rollouts_of(out) >= rollouts  # noqa: E731
            wait(f"{rollouts} rollouts of {out}", START_S, there, interval_s=0.02)
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
        killed_after_s = time.monotonic() - begin
        process.wait(timeout=LEAVE_S)
    wait(f"the processes of {out} to end", LEAVE_S, lambda: not processes_of(out))
    return killed_after_s


def processes_of(out: Path) -> list[str]:
    """Command lines that name a run's directory (trainers and engines of it, and its driver)."""
    found = subprocess.run(["pgrep", "-af", str(out)], capture_output=True, text=True, timeout=30).stdout
    return [line for line in found.splitlines() if "pgrep" not in line and "pytest" not in line]


def assert_equal(expected: Run, found: Run) -> None:
    for rollout_id in range(TOTAL):
        a, b = (load_dump(run.output_dir / "dump" / f"{rollout_id}.pt")["samples"] for run in (expected, found))
        for name in SAMPLE_FIELDS:
            assert [sample[name] for sample in a] == [sample[name] for sample in b], (rollout_id, name)
    steps_a, steps_b = (run.records("train/step") for run in (expected, found))
    assert len(steps_a) == len(steps_b) == TOTAL
    for one, other in zip(steps_a, steps_b, strict=True):
        assert {name: one[name] for name in EXACT_COLUMNS} == {name: other[name] for name in EXACT_COLUMNS}
        gap = "train/train_rollout_logprob_abs_diff"
        assert one[gap] == pytest.approx(other[gap], abs=1e-5)
    a, b = (load_file(run.output_dir / "hf" / "model.safetensors") for run in (expected, found))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
