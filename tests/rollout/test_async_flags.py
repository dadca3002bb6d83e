"""Flags of generating ahead: what follows from the fully async rollout, what it refuses, what the user is told."""

from __future__ import annotations

import logging

import pytest

from slime.utils.arguments import accept
from slime.utils.arguments.problems import Problems
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
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
