"""Questions about the command line: help of a group, explanation of a flag, the list of refusals, shell completion."""

from __future__ import annotations

import re
import subprocess

import pytest

from slime.config.parse import CommandLine
from slime.config.parser import HERE
from slime.utils.errors import UsageError


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


def answer(command_line: CommandLine, line: str) -> str:
    text = command_line.answer(line.split())
    assert text is not None
    return " ".join(text.split())


def test_help_shows_our_groups_and_names_the_others(command_line: CommandLine) -> None:
    text = answer(command_line, "--help")
    assert "--rollout-batch-size INT REQUIRED: prompts per rollout" in text
    assert "--adam-beta1" not in text and "megatron: OptimizerConfig" in text


def test_help_of_a_group_shows_that_group_alone(command_line: CommandLine) -> None:
    text = answer(command_line, "--help optimizer")
    assert "--adam-beta1" in text and "--rollout-batch-size" not in text


def test_help_of_a_word_that_is_no_group_shows_the_flags_with_it_in_their_names(command_line: CommandLine) -> None:
    text = answer(command_line, "--help wandb")
    assert "--use-wandb" in text and "--wandb-project" in text and "--output-dir" not in text


def test_help_of_an_unknown_group_names_the_nearest(command_line: CommandLine) -> None:
    with pytest.raises(UsageError, match="--help rolout: no group .* did you mean Rollout"):
        command_line.answer(["--help", "rolout"])


def test_a_flag_is_explained_with_its_value_on_this_line(command_line: CommandLine) -> None:
    text = answer(command_line, "--explain global-batch-size --rollout-batch-size 4 --n-samples-per-prompt 3")
    assert text.startswith("--global-batch-size group: Data and batches") and "status: works" in text
    assert "on this line: 12 (derived)" in text  # 4 prompts x 3 samples, all of them one step
    assert "on this line: 4 (given)" in answer(command_line, "--explain rollout_batch_size --rollout-batch-size 4")


def test_an_explanation_says_what_is_refused_and_what_a_flag_was_called(command_line: CommandLine) -> None:
    assert "status: not supported (use --num-rollout 0" in answer(command_line, "--explain skip-train")
    assert "status: works" in answer(command_line, "--explain lora-rank")
    assert answer(command_line, "--explain prompt-key").startswith("--input-key")


def test_an_unknown_flag_is_not_explained_but_its_neighbour_is_named(command_line: CommandLine) -> None:
    with pytest.raises(UsageError, match="--explain: unknown flag --gama: did you mean --gamma"):
        command_line.answer(["--explain", "gama"])


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate=1e-6", "--lr"),
        ("--critic-lr", "--megatron-config-path"),
        ("--num_generations", "--n-samples-per-prompt"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "--lr"),
        ("actor_rollout_ref.rollout.n=8", "--n-samples-per-prompt"),
        ("critic.optim.lr=1e-5", "--megatron-config-path"),
    ],
)
def test_the_name_that_another_trainer_gives_to_a_flag_is_answered_with_ours(
    command_line, word: str, flag: str
) -> None:
    (sentence,) = [text for text in command_line.check([word]).problems.wrong if text.startswith("unknown flag")]
    assert sentence.startswith(f"unknown flag {word.split('=')[0]}: that is {flag}")


def test_every_name_of_another_trainer_leads_to_flags_that_exist(command_line: CommandLine) -> None:
    known = command_line.parser.options()
    for name, ours in HERE.items():
        assert f"--{name}" not in known, "it needs no hint"
        flags = re.findall(r"--[a-z][a-z-]*", ours)
        assert flags and set(flags) <= known.keys(), name


def test_what_a_run_refuses_is_listed_with_the_reason(command_line: CommandLine) -> None:
    refused = answer(command_line, "--list-unsupported")
    assert "--skip-train use --num-rollout 0" in refused and "--normalization LayerNorm no family of" in refused
    named = re.findall(r"--[a-z0-9-]+", refused)
    assert len(named) > 100 and not [name for name in named if name.startswith("--lora")]
    problems = command_line.check(["--skip-train"]).problems.all()
    assert any(sentence.startswith("--skip-train is not supported: use --num-rollout 0") for sentence in problems)


def test_bash_completes_flags_and_choices_behind_an_interpreter(command_line: CommandLine) -> None:
    script = command_line.answer(["--completion", "bash"])
    assert script is not None

    def complete(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        command = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _slime_interpreter; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script + command], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("python", "train.py", "--rollout-batch") == ["--rollout-batch-size"]
    assert complete("bash", "scripts/run-x.sh", "--loss-type", "") == ["policy_loss", "sft_loss", "custom_loss"]
    assert complete("python", "other.py", "--rollout-batch") == []


def test_a_command_line_without_a_question_has_no_answer(command_line: CommandLine) -> None:
    assert command_line.answer(["--rollout-batch-size", "4"]) is None
