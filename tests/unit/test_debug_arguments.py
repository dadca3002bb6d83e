"""What flags of dumps, replays, checks and memory snapshots are refused for, and what a debug mode warns of."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from slime.config.parse import accept
from slime.config.problems import Problems
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

WRONG = {
    "--save-debug-train-data out/{step}.pt": "only {rollout_id} and {rank} can be filled in, not {step}",
    "--load-debug-rollout-data x/{rollout_id}.pt --save-debug-rollout-data x/{rollout_id}.pt": (
        "--load-debug-rollout-data x/{rollout_id}.pt would be overwritten by this run's own dumps"
    ),
    "--load-debug-rollout-data x/{rollout_id}.pt --load-debug-rollout-data-subsample 0": "0.0 must lie in (0, 1]",
    "--load-debug-rollout-data-subsample 0.5": "has no effect without --load-debug-rollout-data or --load-forge",
    "--ci-test --ci-load-grad-norm n/{rollout_id}{step_id}{name}": "{role} and {rollout_id} and {step_id} can be",
    "--ci-test --ci-save-grad-norm n{rollout_id}-{step_id} --ci-load-grad-norm n{rollout_id}-{step_id}": (
        "are both n{rollout_id}-{step_id}: each norm would be compared with itself"
    ),
    "--ci-load-grad-norm n{rollout_id}-{step_id}": "--ci-load-grad-norm has no effect without --ci-test.",
    "--ci-disable-kl-checker": "--ci-disable-kl-checker has no effect without --ci-test.",
    "--ci-train-rollout-logprob-abs-diff-threshold 0.2": "has no effect without --ci-test.",
    "--record-memory-history": "--memory-recorder torch records CUDA's allocator, which --accelerator cpu does",
    "--memory-recorder memray": "--memory-recorder has no effect without --record-memory-history.",
    "--memory-snapshot-dir out": "--memory-snapshot-dir has no effect without --record-memory-history.",
    "--memory-snapshot-path a.pickle": "path a.pickle has no effect without --record-memory-history.",
}


@pytest.mark.parametrize("changes", WRONG)
def test_what_cannot_work_is_named(check: Check, changes: str) -> None:
    has(check(changes).problems.wrong, WRONG[changes])


def test_a_critics_gradient_norms_are_not_written_over_the_actors(check: Check) -> None:
    norms = "--ci-test --ci-save-grad-norm n/{rollout_id}-{step_id}.txt"
    assert check(norms).problems == Problems()
    shared = check(f"{norms} --advantage-estimator ppo")
    assert shared.problems.all() == []
    has(shared.warnings(), "is overwritten by later train steps; add {role} to keep all.")


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ("--save-debug-rollout-data one.pt", "--save-debug-rollout-data one.pt is one file, which every rollout over"),
        ("--save-debug-train-data {rank}.pt", "--save-debug-train-data {rank}.pt is one file, which every rollout"),
        ("--ci-test --ci-save-grad-norm n.pt", "later train steps; add {rollout_id} and {step_id} to keep all."),
        ("--load-debug-rollout-data there.pt", None),
        ("--save-debug-rollout-data one.pt --num-rollout 1", None),
        ("--ci-test --ci-save-grad-norm n.pt --num-rollout 1", None),
    ],
)
def test_a_template_without_the_rollout_is_one_file(check: Check, changes: str, warning: str | None) -> None:
    Path("there.pt").write_bytes(b"")
    given = check(changes)
    assert given.problems.all() == []
    overwritten = [said for said in given.warnings() if "overwrit" in said]
    assert (len(overwritten) == 1 and warning in overwritten[0]) if warning else overwritten == []


def test_memray_is_asked_for_only_where_it_is_installed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    asked = "--record-memory-history --memory-recorder memray --memory-snapshot-dir out"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name != "memray" and find_spec(name, *a) or None)
    has(check(asked).problems.environment, "--memory-recorder memray is not installed here; pip install memray.")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name == "memray" or find_spec(name, *a))
    assert check(asked).problems == Problems()


def test_directories_that_cannot_be_written_are_named(check: Check) -> None:
    Path("file").write_text("")
    for changes, option in (
        ("--save-debug-train-data file/{rollout_id}.pt", "--save-debug-train-data file"),
        ("--dump-details file", "--save-debug-rollout-data file/rollout_data"),
        ("--ci-test --ci-save-grad-norm file/{rollout_id}-{step_id}", "--ci-save-grad-norm file"),
    ):
        has(check(changes).problems.environment, f"{option} cannot be written")


def test_a_replay_has_a_file_for_every_rollout(check: Check) -> None:
    Path("dump").mkdir()
    replay = "--load-debug-rollout-data dump/{rollout_id}.pt --num-rollout 3"
    for rollout_id in (0, 1):
        Path(f"dump/{rollout_id}.pt").write_bytes(b"")
    has(
        check(replay).problems.environment,
        "there is no file dump/2.pt; dump it with --save-debug-rollout-data, or end before it with --num-rollout 2.",
    )
    Path("dump/2.pt").write_bytes(b"")
    assert check(replay).problems == Problems()


def test_a_replay_reads_no_prompts_and_counts_files_instead_of_epochs(check: Check) -> None:
    Path("dump").mkdir()
    Path("dump/0.pt").write_bytes(b"")
    replay, data = "--load-debug-rollout-data dump/{rollout_id}.pt", "--prompt-data --label-key --rm-type"
    assert check(f"{replay} --num-rollout 1", without=data).problems == Problems()
    epochs = check(f"{replay} --num-epoch 2", without=f"{data} --num-rollout")
    has(epochs.problems.wrong, "--load-debug-rollout-data needs --num-rollout, the number of files")


def test_what_a_mode_leaves_without_effect_is_said(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    Path("dump").mkdir()
    Path("dump/0.pt").write_bytes(b"")
    replay = check("--load-debug-rollout-data dump/{rollout_id}.pt --num-rollout 1 --rollout-num-gpus 1")
    accept(dataclasses.replace(replay, problems=Problems()))
    assert "--load-debug-rollout-data starts no engines, so these flags have no effect:" in caplog.text
    assert "--prompt-data" in caplog.text and "--rm-type" in caplog.text
    engines = check("--debug-rollout-only --rollout-num-gpus 1 --ci-test --save out", without="--colocate")
    assert engines.problems == Problems()
    accept(engines)
    assert "--debug-rollout-only starts no trainers, so these flags have no effect: --ci-test --save." in caplog.text
