"""Every family through a run on the CPU engine: it and the trainer compute the same, before and after a sync."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import grpo_flags, make_model, train, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("glm4", []),
        ("mimo", ["--trust-remote-code"]),
        ("qwen2_moe", []),
        ("glm4_moe", []),
        ("glm4_moe_lite", []),
        ("deepseek_v3", []),
        ("kimi_k2", []),
    ],
)
def test_engine_and_trainer_agree_before_and_after_a_weight_sync(family: str, flags: list[str], tmp_path: Path):
    model, prompts = make_model(tmp_path / "model", "--family", family), write_prompts(tmp_path / "prompts.jsonl")
    placement = ["--num-rollout", 2, "--rollout-num-gpus", 1]
    run = train(tmp_path / "out", *grpo_flags(model, prompts), *placement, *flags)
    differences = run.column("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-5
