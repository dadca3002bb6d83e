"""A router, an engine and a trainer that die during a run cost no rollout; others take their place."""

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
        f"{ROOT}/tests/integration/user_code.py:kill_router_and_engine",
        "--max-restarts", 1, "--save", work / "saved", "--save-interval", 100, "--peer-checkpoint-interval", 1,
        "--custom-megatron-before-train-step-hook-path",
        f"{ROOT}/tests/integration/user_code.py:kill_this_rank_in_rollout_3",
    )  # fmt: skip


def test_no_rollout_is_lost_with_the_engine(run: Run) -> None:
    assert run.status == 0
    assert len(run.records("train/step")) == NUM_ROLLOUT
    assert "is lost, the others go on without it" in run.printed
    assert run.printed.count("is lost, the others") == 1, run.printed


def test_a_lost_router_comes_back_with_its_engines(run: Run) -> None:
    assert "has ended (killed by SIGKILL); it is started again" in run.printed
    assert "is back with 2 engine(s)" in run.printed


def test_a_lost_trainer_is_replaced_and_sends_its_weights_to_engines_that_stayed(run: Run) -> None:
    """It is killed in rollout 3; the new one forms a process group anew with the engines."""
    assert (run.output_dir / "killed_a_rank").exists()
    assert "rank 0 of 1 is lost" in run.printed


def test_a_lost_trainer_goes_on_from_a_copy_in_memory_and_does_no_step_twice(run: Run) -> None:
    """No checkpoint is due before the last rollout."""
    assert "trainers go on after rollout 2, from copies in memory" in run.printed
    rows = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/step"] for row in rows if row["step_key"] == "train/step"] == list(range(NUM_ROLLOUT))
    sizes = run.column("perf/peer_copy_bytes", "rollout/step")
    assert len(sizes) == NUM_ROLLOUT - 1 and len(set(sizes)) == 1, "the last rollout is saved in place of it"
    assert min(run.column("perf/peer_copy_time", "rollout/step")) > 0
    saved = run.output_dir.parent / "saved"
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_{NUM_ROLLOUT - 1:07d}"]
    assert len(list((saved / "rollout").glob("*.pt"))) == 1, "states of the copies are gone"


def test_the_new_engine_has_the_trainers_weights(run: Run) -> None:
    assert "takes the place of a lost one" in run.printed
    # fp32 on both sides: the engines' log-probs are the trainer's but for rounding, with the weights of each step
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == NUM_ROLLOUT and max(gaps) < 1e-4, gaps
    answers = list(json.loads((run.output_dir / "answers.json").read_text()).values())
    assert len(answers) == 2, "both engines are behind the router"
    versions = [answer["weight_version"] for answer in answers]
    assert versions == ["5", "5"], "one sync at the start, one after each of rollouts 0 to 2, one of the new trainer"
    old, new = ([value for value, *_ in answer["output_token_logprobs"]] for answer in answers)
    assert old == pytest.approx(new, abs=1e-5)
