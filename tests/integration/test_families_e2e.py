"""Every family through a run on the CPU engine: it and the trainer compute the same, before and after a sync."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.launch import grpo_flags, make_model, train, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", []),
        ("qwen2", []),
        ("glm4", []),
        ("mimo", ["--trust-remote-code"]),
        ("qwen2_moe", []),
        ("glm4_moe", []),
        ("glm4_moe_lite", []),
        ("deepseek_v3", []),
        ("deepseek_v3", ["--update-weight-buffer-size", 1]),  # SGLang loads some of its weights in pairs only
        ("kimi_k2", []),
        ("minimax_m2", []),
    ],
)
def test_engine_and_trainer_agree_before_and_after_a_weight_sync(family: str, flags: list[Any], tmp_path: Path):
    model, prompts = make_model(tmp_path / "model", "--family", family), write_prompts(tmp_path / "prompts.jsonl")
    placement = ["--num-rollout", 2, "--rollout-num-gpus", 1]
    run = train(tmp_path / "out", *grpo_flags(model, prompts), *placement, *flags)
    differences = run.column("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v32"])
def test_a_family_whose_engine_needs_a_gpu_learns_a_sentence_by_heart_without_one(family: str, tmp_path: Path):
    """SGLang's kernels for their layers are CUDA's; the trainer and its checkpoint need none."""
    model, prompts = make_model(tmp_path / "model", "--family", family), tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "seven, I think"}]
    prompts.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    run = train(
        tmp_path / "out",
        *("--accelerator", "cpu", "--actor-num-gpus-per-node", 1, "--hf-checkpoint", model, "--model-args-from-hf"),
        *("--loss-type", "sft_loss", "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *("--debug-train-only", "--disable-compute-advantages-and-returns", "--calculate-per-token-loss"),
        *("--prompt-data", prompts, "--input-key", "messages", "--loss-mask-type", "qwen3", "--num-rollout", 8),
        *(
            "--rollout-batch-size",
            8,
            "--global-batch-size",
            8,
            "--lr",
            1e-2,
            "--save-hf",
            tmp_path / "hf_{rollout_id}",
        ),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--save-hf", tmp_path / "hf_{rollout_id}"),
    )
    losses = run.column("train/loss")
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
    exported = load_file(tmp_path / "hf_7" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()
