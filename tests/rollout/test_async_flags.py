"""Flags of generating ahead: what follows from the fully async rollout, what it refuses, what the user is told."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from pathlib import Path

import pytest

import train_async
from slime.config.parse import accept
from slime.config.problems import Problems
from slime.config.rules.losses import correction_warnings
from slime.ray import driver
from tests.unit.argument_lines import Check, base, check, command_line, has, line

__all__ = ["base", "check", "command_line"]  # fixtures

ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
ROOT = Path(__file__).parents[2]
ALONE = f"--rollout-num-gpus 1 --rollout-function-path {ASYNC}"


@pytest.mark.parametrize("path", [ASYNC, "slime.rollout.fully_async_rollout:generate_rollout_fully_async"])
def test_the_fully_async_rollout_keeps_requests_in_flight_unless_told_not_to(check: Check, path: str) -> None:
    checked = check(f"--rollout-num-gpus 1 --rollout-function-path {path}", without="--colocate")
    assert checked.problems == Problems()
    assert checked.args.update_weights_in_flight is True
    assert check().args.update_weights_in_flight is False
    told = check(f"{ALONE} --no-update-weights-in-flight", without="--colocate")
    assert told.args.update_weights_in_flight is False
    asked = check("--rollout-num-gpus 1 --update-weights-in-flight", without="--colocate")
    assert (asked.problems, asked.args.update_weights_in_flight) == (Problems(), True)


def test_the_user_is_told_that_the_prefix_cache_is_off(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        accept(check(ALONE, without="--colocate"))
    assert "engines run with --sglang-disable-radix-cache" in caplog.text


@pytest.mark.parametrize(
    ("changes", "without", "sentence"),
    [
        (f"--rollout-function-path {ASYNC}", "", "generates while the trainer trains; drop --colocate"),
        ("--update-weights-in-flight", "", "--update-weights-in-flight and --colocate exclude"),
        (
            f"{ALONE} --data-source-path slime.rollout.data_source.RolloutDataSource",
            "--colocate",
            "takes none; use slime.rollout.data_source.RolloutDataSourceWithBuffer",
        ),
        (f"{ALONE} --rm-type nonsense", "--colocate", "nonsense is no built-in reward"),
        ("--max-weight-staleness -1", "", "--max-weight-staleness -1 must be at least 0"),
        ("--async-buffer-size 0", "", "--async-buffer-size 0 must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(
    check: Check, changes: str, without: str, sentence: str
) -> None:
    has(check(changes, without=without).problems.wrong, sentence)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ("", "give --use-rollout-logprobs (or --use-tis or --keep-old-actor)"),
        ("--use-opsm", "give --use-rollout-logprobs (or --use-tis or --keep-old-actor)"),
        ("--max-weight-staleness 0 --update-weights-interval 2", "give --use-rollout-logprobs (or"),
        (f"--rollout-function-path {ASYNC}", "give --use-rollout-logprobs (or --use-tis);"),
        ("--rollout-top-p 0.9", "give --keep-old-actor;"),
        (
            f"--rollout-top-p 0.9 --rollout-function-path {ASYNC}",
            "give --max-weight-staleness 0 and --update-weights-interval 1;",
        ),
    ],
)
def test_running_ahead_without_a_correction_warns_with_the_flags_that_can_be_given(
    check: Check, changes: str, remedy: str
) -> None:
    [sentence] = correction_warnings(check(f"--rollout-num-gpus 1 {changes}", without="--colocate").args)
    assert remedy in sentence and "responses of older weights" in sentence


@pytest.mark.parametrize(
    "changes",
    [
        *("--use-rollout-logprobs", "--use-tis", "--keep-old-actor", "--max-weight-staleness 0"),
        *("--loss-type sft_loss", "--debug-rollout-only", "--eval-only"),
    ],
)
def test_a_run_with_a_correction_or_without_old_tokens_is_not_warned(check: Check, changes: str) -> None:
    args = check(f"--rollout-num-gpus 1 {changes}", without="--colocate").args
    assert list(correction_warnings(args)) == []


def test_the_warning_is_logged_once_at_the_start_and_shown_by_the_dry_run(
    base: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    argv = ["train_async.py", *line(base, "--rollout-num-gpus 1", "--colocate")]
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)
    monkeypatch.setattr(driver, "configure_logger", lambda: None)

    def drive(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [*argv, *more])
        caplog.clear()
        driver.drive(lambda args: None, check=train_async.check, warn=correction_warnings)
        return [record.getMessage() for record in caplog.records if "of older weights" in record.getMessage()]

    assert len(drive()) == 1
    assert drive("--use-rollout-logprobs") == []
    assert drive("--dry-run", "--dry-run-json", str(tmp_path / "plan.json")) == []
    [shown] = [
        text for text in json.loads((tmp_path / "plan.json").read_text())["warnings"] if "older weights" in text
    ]
    assert "give --use-rollout-logprobs" in shown


def examples() -> list[tuple[str, list[str]]]:
    """(where it is, its words) of each command line of train_async.py in what users copy from."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "train_async.py"]
    files += [path for folder in ("examples", "scripts") for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = []
    for path in files:
        if path.suffix in (".md", ".sh", ".py", ".yaml"):
            text = path.read_text().replace("\\\n", " ")
            for words in re.findall(r'^\s*(?:python|"\$PYTHON") train_async\.py (.*)', text, flags=re.MULTILINE):
                found.append((str(path.relative_to(ROOT)), shlex.split(words)))
    return found


def test_every_example_of_running_ahead_has_a_correction() -> None:
    corrects = {"--use-rollout-logprobs", "--use-tis", "--keep-old-actor"}
    lines = examples()
    assert {where for where, _ in lines} >= {"docs/async.md", "docs/disaggregated.md", "train_async.py"}
    for where, words in lines:
        by_file = any("mis.yaml" in word for word in words) or "examples/train_infer_mismatch_helper" in where
        assert corrects & set(words) or by_file, f"{where}: {' '.join(words)}"
    assert "use_tis: true" in (ROOT / "examples/train_infer_mismatch_helper/mis.yaml").read_text()
