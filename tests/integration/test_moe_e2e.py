"""A model with experts through a whole run: engine, routing replay from it (R3), experts on two ranks, weight sync."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.launch import Run, grpo_flags, make_model, train, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work: Path = tmp_path_factory.mktemp("moe")
    model, prompts = make_model(work / "model", "--family", "qwen3_moe"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--num-rollout", 2,
        "--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2, "--rollout-num-gpus", 1,
        "--use-rollout-routing-replay", "--moe-aux-loss-coeff", 0.01,
        "--save-debug-rollout-data", work / "out" / "dump" / "{rollout_id}.pt",
    )  # fmt: skip


def test_the_trainer_replays_the_engines_experts_and_agrees_with_it_before_and_after_a_weight_sync(run: Run):
    differences = run.column("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert min(run.column("train/load_balancing_loss")) >= 0.99


def test_samples_hold_the_experts_of_every_token_but_the_last(run: Run):
    samples = torch.load(run.output_dir / "dump" / "1.pt", weights_only=False)["samples"]
    for sample in samples:
        assert len(sample["rollout_routed_experts"]) == len(sample["tokens"]) - 1
