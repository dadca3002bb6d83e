"""What the flags of rewards need and refuse, through whole command lines."""

from __future__ import annotations

import pytest

from slime.config.problems import Problems
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("--rm-type remote_rm", "--rm-type remote_rm needs --rm-url, the address of the reward service."),
        ("--rm-type code", "--rm-type code needs --code-sandbox-url, the address of the service that runs the code."),
        ("--rm-type classify", "--rm-type classify needs --reward-model-path, the reward model."),
        ("--rm-type ifbensh", "--rm-type ifbensh is no built-in reward: did you mean ifbench?"),
        ("--rm-url rewards:80", "--rm-url 'rewards:80' is no address: it must begin with http:// or https://"),
        ("--code-sandbox-url http://", "--code-sandbox-url 'http://' is no address"),
        ("--rm-url http://a --http-proxy squid:3128", "--http-proxy 'squid:3128' is no address"),
        ("--http-proxy http://a", "--http-proxy has no effect without --rm-url or --code-sandbox-url."),
        ("--code-sandbox-concurrency 4", "--code-sandbox-concurrency has no effect without --code-sandbox-url."),
        (
            "--code-sandbox-url http://a --code-sandbox-concurrency 0",
            "--code-sandbox-concurrency 0 must be at least 1",
        ),
        ("--overlong-buffer-len 4", "--overlong-buffer-len has no effect without --rollout-max-response-len."),
        ("--overlong-penalty-factor 2", "--overlong-penalty-factor has no effect without --overlong-buffer-len."),
        (
            "--rollout-max-response-len 9 --overlong-buffer-len 4 --overlong-penalty-factor -1",
            "--overlong-penalty-factor -1.0 must be at least 0",
        ),
        (
            "--rollout-max-response-len 9 --overlong-buffer-len 4 --custom-reward-post-process-path os.path.join",
            "--overlong-buffer-len has no effect with --custom-reward-post-process-path",
        ),
        (
            "--rollout-max-response-len 9 --overlong-buffer-len 4 "
            "--custom-convert-samples-to-train-data-path os.path.join",
            "--overlong-buffer-len has no effect with --custom-convert-samples-to-train-data-path",
        ),
        (
            "--rollout-max-response-len 9 --overlong-buffer-len 4 --loss-type sft_loss",
            "--overlong-buffer-len has no effect with --loss-type sft_loss",
        ),
    ],
)
def test_a_reward_flag_that_cannot_work_is_refused(check: Check, changes: str, sentence: str) -> None:
    has(check(changes).problems.wrong, sentence)


@pytest.mark.parametrize(
    "changes",
    [
        "--rm-type code --code-sandbox-url http://sandbox:8080 --code-sandbox-concurrency 8",
        "--rm-type remote_rm --rm-url https://rewards/score --http-proxy http://squid:3128",
        "--rm-type ifbench",
        "--rollout-max-response-len 16 --overlong-buffer-len 16 --overlong-penalty-factor 0.5",
    ],
)
def test_reward_flags_that_fit_are_accepted(check: Check, changes: str) -> None:
    assert check(changes).problems == Problems()
