"""Layers of TransformerEngine have the numbers of Megatron's local layers; needs CUDA and the package.

    python -m pytest -q tests/gpu/test_transformer_engine.py

Both compute in bfloat16 what HF computes in fp32. TransformerEngine's logits and gradients may be as far from HF's as
those of the local layers are, and half as much again: the two round at different places.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.parity_world import of_gpus, relative
from tests.gpu.test_train_runs import CUDA, GAP, SIZES
from tests.integration.launch import grpo_flags, make_model, train, write_prompts
from tests.integration.trainer_world import trainer_args
from tests.training.parallel import hf_parity
from tests.unit.megatron_fakes import make_hf_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
    ),
]
ENGINE = ("--transformer-impl", "transformer_engine")
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
LATENT = {
    "hidden_size": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
TP, CP = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "dense": ("qwen3", WIDE, "", 1),
    "dense, biases of queries": ("qwen2", {"hidden_size": 256}, "", 1),
    "dense, recomputed": ("qwen3", WIDE, FULL, 1),
    "dense, activations offloaded": ("qwen3", WIDE, "--cpu-offloading --cpu-offloading-num-layers 1", 1),
    "norms behind attention and MLP": ("glm4", WIDE, "", 1),
    "experts": ("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}, "", 1),
    "latent attention, shared experts": ("deepseek_v3", LATENT, "", 1),
    "TP 2": ("qwen3", WIDE, TP, 2),
    "CP 2": ("qwen3", WIDE, CP, 2),
    "latent attention, TP 2": ("deepseek_v3", LATENT, TP, 2),
}
"""Name -> family, sizes of the model, Megatron's flags, GPUs."""


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_as_near_to_hf_as_those_of_local_layers(tmp_path: Path, case: str) -> None:
    family, sizes, flags, num_gpus = CASES[case]
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    hf_path = tmp_path / "hf"
    expected = hf_parity.of_hf_model(make_hf_model(hf_path, family, **sizes), tmp_path / "gradients")
    far: dict[str, dict[str, float]] = {}
    for kind in ("local", "transformer_engine"):
        args = trainer_args(hf_path, f"{flags} --transformer-impl {kind}", accelerator="cuda", max_tokens_per_gpu=50)
        found = of_gpus(args, num_gpus, tmp_path / f"{kind}.pt", has_its_modules)
        far[kind] = {what: relative(found[what], expected[what]) for what in ("logits", "gradients")}
    print(case, far)
    for what, distance in far["transformer_engine"].items():
        assert 0 < distance <= 1.5 * far["local"][what], far


def test_a_run_trains_beside_its_engine_and_goes_on_with_local_layers_and_back(tmp_path: Path) -> None:
    model, saved = make_model(tmp_path / "model", *SIZES), tmp_path / "checkpoints"
    flags = [*grpo_flags(model, write_prompts(tmp_path / "prompts.jsonl")), *CUDA, "--save", saved]
    first = train(tmp_path / "first", *flags, *ENGINE, "--num-rollout", 2, "--check-weight-update-equal")
    then = train(tmp_path / "then", *flags, "--load", saved, "--num-rollout", 3)
    back = train(tmp_path / "back", *flags, *ENGINE, "--load", saved, "--num-rollout", 4)
    assert [len(run.records("train/step")) for run in (first, then, back)] == [2, 1, 1], "each goes on"
    gaps = [*first.column(GAP), *then.column(GAP), *back.column(GAP)]
    assert 0 < max(gaps) < 0.05, gaps


def has_its_modules(args: argparse.Namespace, ran: set[str]) -> None:
    theirs = {"TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
    assert theirs & ran == (set() if args.transformer_impl == "local" else theirs), ran
