"""Flags of the trainer's processes on whole command lines: what they become, and what each wrong one says."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.parse import Checked, CommandLine
from tests.unit.argument_mutations import write_files

BASE = (
    "--accelerator cpu --hf-checkpoint hf --model-args-from-hf --prompt-data data.jsonl --label-key label "
    "--rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 20 --colocate"
)

Check = Callable[[str], Checked]


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


@pytest.fixture
def check(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks the base line with more flags."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return lambda more: command_line.check(shlex.split(f"{BASE} {more}"))


def test_the_budget_of_log_prob_passes_is_that_of_training_unless_given(check: Check) -> None:
    dynamic = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
    assert check(dynamic).args.log_probs_max_tokens_per_gpu == 64
    checked = check(f"{dynamic} --log-probs-max-tokens-per-gpu 256")
    assert checked.args.log_probs_max_tokens_per_gpu == 256
    assert checked.problems.all() == []


@pytest.mark.parametrize(
    ("flags", "parts", "without_optimizer"),
    [
        ("", ["model", "optimizer", "rng"], False),
        ("--no-save-optim", ["model", "rng"], True),
        ("--checkpoint-contents model", ["model"], True),
        ("--checkpoint-contents model,hf", ["model", "hf"], True),
        ("--checkpoint-contents rng, model optimizer model", ["rng", "model", "optimizer"], False),
        ("--checkpoint-contents model,rng --no-save-optim", ["model", "rng"], True),
    ],
)
def test_the_contents_of_a_checkpoint_are_words_or_a_list_with_commas(
    check: Check, flags: str, parts: list[str], without_optimizer: bool
) -> None:
    checked = check(f"--save out {flags}")
    assert checked.args.checkpoint_contents == parts
    assert checked.args.no_save_optim == without_optimizer
    assert checked.problems.all() == []


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [("", False), ("--profile", True), ("--use-pytorch-profiler", True), ("--profile-target train_actor", True)],
)
def test_each_way_to_ask_for_a_profile_turns_it_on(check: Check, flags: str, is_on: bool) -> None:
    checked = check(flags)
    assert checked.args.use_pytorch_profiler == is_on
    assert checked.problems.all() == []


WRONG = {
    "--train-env-vars '{\"A\": 1}'": "--train-env-vars: A=1 is no text; write the value in double quotes",
    "--train-env-vars '[1]'": "--train-env-vars: '[1]' is no JSON object",
    '--train-env-vars \'{"A=B": "1"}\'': "'A=B' cannot be the name of a variable",
    '--train-env-vars \'{"RANK": "1"}\'': "RANK='1' cannot be set: slime gives every rank its own; leave it out.",
    '--train-env-vars \'{"NCCL_CUMEM_ENABLE": "1"}\'': "the weight sync fails where the two differ",
    "--log-probs-max-tokens-per-gpu 64": "--log-probs-max-tokens-per-gpu has no effect without --use-dynamic-batch",
    "--use-dynamic-batch-size --max-tokens-per-gpu 8 --log-probs-max-tokens-per-gpu 0": (
        "--log-probs-max-tokens-per-gpu 0 must be at least 1"
    ),
    "--save out --keep-checkpoints 0": "--keep-checkpoints 0 must be at least 1",
    "--keep-checkpoints 2": "--keep-checkpoints has no effect without --save or --save-hf",
    "--checkpoint-contents model": "--checkpoint-contents has no effect without --save",
    "--save out --checkpoint-contents model,optimiser": "'optimiser' is no part of a checkpoint: did you mean",
    "--save out --checkpoint-contents rng": "--checkpoint-contents 'rng' lacks model",
    "--save out --checkpoint-contents ,": "--checkpoint-contents '' lacks model",
    "--save out --no-save-optim --checkpoint-contents model,optimizer": "--no-save-optim contradicts",
    "--save out --save-hf hf_out --checkpoint-contents model,hf": "would export the same weights twice",
    "--profile --profile-step-start 3 --profile-step-end 3": "--profile-step-start 3 must be less than",
    "--profile --profile-step-start 20 --profile-step-end 21": (
        "--profile-step-start 20 is never reached with --num-rollout 20, whose last rollout is 19"
    ),
    "--profile --profile-ranks 0 1": "--profile-ranks 1: there are 1 trainer ranks, 0 to 0",
    "--profile --profile-ranks -1": "--profile-ranks -1: there are 1 trainer ranks",
    "--profile-ranks 0": "--profile-ranks has no effect without --use-pytorch-profiler",
    "--profile-target train_overall train_actor": "train_overall holds the others already",
    "--profile-target train": "invalid choice: 'train'",
    "--ray-timeline-path data.jsonl/timeline.json": "--ray-timeline-path data.jsonl/timeline.json cannot be written",
    "--ray-timeline-path hf": "--ray-timeline-path hf is a directory",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_cannot_work_is_refused_by_value_flag_and_remedy(check: Check, flags: str) -> None:
    problems = check(flags).problems
    sentences = [*problems.all(), *problems.no_effect]
    assert any(WRONG[flags] in sentence for sentence in sentences), sentences
    assert len(sentences) == 1, sentences
