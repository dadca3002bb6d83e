"""An engine that dies during a run costs no rollout, and another takes its place with the trainer's weights."""

from __future__ import annotations

import json

import pytest

from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(900)
NUM_ROLLOUT = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work = tmp_path_factory.mktemp("fault_tolerance")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--rollout-num-gpus", 2, "--num-rollout", NUM_ROLLOUT,
        "--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 20,
        "--rollout-health-check-first-wait", 1,
        "--custom-rollout-log-function-path",
        f"{ROOT}/tests/integration/user_code.py:kill_an_engine_after_rollout_1",
    )  # fmt: skip


def test_no_rollout_is_lost_with_the_engine(run: Run) -> None:
    assert run.status == 0
    assert len(run.records("train/step")) == NUM_ROLLOUT
    assert "is lost, the others go on without it" in run.printed
    assert run.printed.count("is lost") == 1, run.printed


def test_the_new_engine_has_the_trainers_weights(run: Run) -> None:
    assert "takes the place of a lost one" in run.printed
    # fp32 on both sides: the engines' log-probs are the trainer's but for rounding, with the weights of each step
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == NUM_ROLLOUT and max(gaps) < 1e-4, gaps
    answers = list(json.loads((run.output_dir / "answers.json").read_text()).values())
    assert len(answers) == 2, "both engines are behind the router"
    versions = [answer["weight_version"] for answer in answers]
    assert versions == ["4", "4"], "one sync at the start and one after each of rollouts 0 to 2"
    old, new = ([value for value, *_ in answer["output_token_logprobs"]] for answer in answers)
    assert old == pytest.approx(new, abs=1e-5)
