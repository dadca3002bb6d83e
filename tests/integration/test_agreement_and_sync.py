"""Engine and trainer hold the same weights and compute the same log-probs, before and after training.

A run of three rollouts, with a trainer of TP 2 x PP 2 beside the engine, serves all these tests (a colocated one is in
test_resume): the first rollout is clean, the second has a trainer weight changed between the sync and the old-log-prob
pass, the third between that pass and the train step. Evaluation dumps what the engine then answers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(1200)
HOOKS = f"{ROOT}/tests/integration/user_code.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work: Path = tmp_path_factory.mktemp("separate")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--num-rollout", 3,
        "--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 1,
        "--custom-megatron-before-log-prob-hook-path", f"{HOOKS}:perturb_before_log_probs",
        "--custom-megatron-before-train-step-hook-path", f"{HOOKS}:perturb_before_train_step",
        "--eval-prompt-data", "digits", prompts, "--eval-interval", 3, "--n-samples-per-eval-prompt", 2,
        "--save", work / "out", "--save-hf", work / "out" / "hf-{rollout_id}",
        "--update-weight-buffer-size", 100_000,
        "--save-debug-rollout-data", work / "out" / "dump" / "{rollout_id}.pt",
    )  # fmt: skip


def test_the_first_step_is_on_policy_and_the_engine_agrees_with_the_trainer(run: Run):
    first = run.records("train/step")[0]
    assert abs(first["train/ppo_kl"]) < 1e-6
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_a_weight_changed_after_the_sync_shows_as_a_gap_to_the_engine(run: Run):
    second = run.records("train/step")[1]
    assert second["train/train_rollout_logprob_abs_diff"] > 1e-2
    assert abs(second["train/ppo_kl"]) < 1e-6, "old and new log-probs come from the same changed weights"


def test_a_weight_changed_after_the_old_log_probs_shows_as_ppo_kl(run: Run):
    third = run.records("train/step")[2]
    assert third["train/train_rollout_logprob_abs_diff"] < 1e-4, "the third rollout began with a fresh sync"
    assert abs(third["train/ppo_kl"]) > 1e-3


def test_after_three_steps_the_engine_answers_with_the_exported_weights(run: Run):
    evaluated = run.output_dir / "dump" / "eval_3.pt"
    assert_answers_are_of(evaluated, run.output_dir / "hf-2", instead_of=run.output_dir.parent / "model")


def assert_answers_are_of(evaluated: Path, exported: Path, *, instead_of: Path) -> None:
    """The engine's log-probs in the dump of an evaluation are those of an HF model, and not of another one."""
    samples = torch.load(evaluated, weights_only=False)["samples"]
    assert samples
    engine = torch.cat([torch.tensor(sample["rollout_log_probs"]) for sample in samples])
    assert (engine - hf_log_probs(exported, samples)).abs().max() < 1e-4
    before = hf_log_probs(instead_of, samples)
    assert (engine - before).abs().max() > 1e-2, "three steps at lr 1e-3 must have moved the engine"


def hf_log_probs(path: Path, samples: list[dict]) -> torch.Tensor:
    """What the HF model in `path` gives the response tokens, one sample at a time."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for sample in samples:
            tokens, response = torch.tensor(sample["tokens"]), sample["response_length"]
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            found.append(log_probs.gather(1, tokens[1:, None])[-response:, 0])
    return torch.cat(found)
