"""train.py --train-backend fsdp: PPO with all roles and its resumption, engines of other families, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_accuracy
from slime.checkpoints.paths import latest_iteration
from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FSDP = ("--train-backend", "fsdp")


def test_a_critic_a_teacher_and_a_moving_reference_train_together_and_resume(tmp_path: Path) -> None:
    model, teacher = make_model(tmp_path / "model"), make_model(tmp_path / "teacher", "--seed", 1)
    flags = [
        *grpo_flags(model, write_prompts(tmp_path / "prompts.jsonl")), *FSDP, "--colocate", "--entropy-coef", 0.01,
        *("--advantage-estimator", "ppo", "--gamma", 0.99, "--lambd", 0.95, "--num-critic-only-steps", 1),
        *("--use-kl-loss", "--kl-loss-coef", 0.01, "--ref-load", model, "--ref-update-interval", 2),
        *("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", teacher),
        *("--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", 3),
    ]  # fmt: skip
    first = train(tmp_path / "first", *flags, "--num-rollout", 3)
    steps = first.records("train/step")
    assert ["train/pg_loss" in step for step in steps] == [False, True, True]
    assert max(first.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert all(gap > 0 for gap in first.column("train/opd_reverse_kl"))
    values = first.column("rollout/values", "rollout/step")
    assert values[0] == 0.0 and len(set(values)) == 3, "the critic learns"
    assert [latest_iteration(tmp_path / "ckpt" / role) for role in (".", "critic")] == [2, 2]

    second = train(tmp_path / "second", *flags, "--num-rollout", 5)
    assert [step["train/step"] for step in second.records("train/step")] == [3, 4]
    assert max(second.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert second.column("rollout/values", "rollout/step")[0] != 0.0, "the critic goes on"


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmo2": {},
    "glm4": {},
    "phi3": {},
    "smollm3": {},
    "mistral": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
"""model_type -> what its config has beside the sizes."""


def make_any(folder: Path, model_type: str) -> Path:
    """A random model of a family of transformers, with the tokenizer of the tiny Qwen3."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    qwen3 = make_model(folder.with_name("qwen3"))
    vocabulary = AutoConfig.from_pretrained(qwen3).vocab_size
    pad = AutoTokenizer.from_pretrained(qwen3).pad_token_id
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1}
    config = AutoConfig.for_model(model_type, vocab_size=vocabulary, pad_token_id=pad, **sizes, **FAMILIES[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in (*qwen3.glob("tokenizer*"), *qwen3.glob("chat_template*")):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("model_type", FAMILIES)
def test_engines_and_the_trainer_agree_before_and_after_a_sync(model_type: str, tmp_path: Path) -> None:
    flags = grpo_flags(make_any(tmp_path / "model", model_type), write_prompts(tmp_path / "prompts.jsonl"))
    flags.remove("--model-args-from-hf")
    flags += ["--num-rollout", 2, "--rollout-num-gpus", 1, "--check-weight-update-equal"]  # after noise in the engine
    run = train(tmp_path / "out", *flags, *FSDP)
    differences = run.column("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2 and max(differences) < 1e-5


def test_each_rank_of_four_loads_its_shards_with_1_2_times_their_bytes() -> None:
    command = [sys.executable, "benchmarks/fsdp_load.py", "--ranks", "4"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
    assert printed.count(": holds)") == 4, printed


def test_the_planned_memory_is_that_of_a_run_within_5_percent(tmp_path: Path) -> None:
    cases = [name for name in plan_accuracy.CASES if "FSDP2" in name]
    command = [sys.executable, "benchmarks/plan_accuracy.py", "--output", tmp_path / "rows.json", "--only", *cases]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1000)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 3 * len(cases) and all(abs(row["ratio"] - 1) <= 0.05 for row in rows), rows
