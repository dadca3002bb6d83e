"""Experts in one grouped product (--moe-grouped-gemm) train as experts one after the other do, wherever they are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import train, trainer_args
from tests.training.parallel.moe_runs import assert_same_training, run
from tests.unit.megatron_fakes import make_hf_model

GROUPED = "--moe-grouped-gemm"
MOE_ACT = "--recompute-granularity selective --recompute-modules moe_act"
LAYOUTS = {
    "one process": ("", 1),
    "recomputed activations": (MOE_ACT, 1),
    "recomputed layers": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    "no fused accumulation": ("--no-gradient-accumulation-fusion", 1),
    "EP 2": ("--expert-model-parallel-size 2", 2),
    "ETP 2": ("--expert-tensor-parallel-size 2", 2),
    "DP 2, overlapped": ("--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000", 2),
}


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """(HF model, its training on one process with experts one after the other, its tensors before)."""
    from safetensors.torch import load_file

    root = tmp_path_factory.mktemp("sequential")
    make_hf_model(root / "hf", "qwen3_moe")
    return root / "hf", run(root / "hf", root / "out.pt"), load_file(root / "hf" / "model.safetensors")


@pytest.mark.parametrize("name", LAYOUTS)
def test_grouped_experts_train_as_sequential_ones_do(name, sequential, tmp_path):
    hf, expected, before = sequential
    flags, dp = LAYOUTS[name]
    assert_same_training(run(hf, tmp_path / "out.pt", f"{GROUPED} {flags}", dp=dp), expected, before)


def check_that_stacking_copies_nothing(actor: Any, _: Any) -> None:
    from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts, stacked
    from slime.backends.megatron_utils.model_provider import unwrap

    found = [module for module in unwrap(actor.state.model[0]).modules() if isinstance(module, GroupedExperts)]
    assert len(found) == 2
    for experts in found:
        for linear in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, linear).weight for expert in experts.local_experts]
            whole = stacked(weights)
            assert whole.data_ptr() == weights[0].data_ptr()
            assert all(torch.equal(whole[i], weight) for i, weight in enumerate(weights))
            assert not any(torch.equal(a, b) for a, b in pairwise(weights))


def test_the_weights_of_a_layers_experts_are_one_tensor_already(sequential):
    train(trainer_args(sequential[0], GROUPED), check_that_stacking_copies_nothing, num_rollouts=0)


def save(actor: Any, *_: Any) -> None:
    actor.save_model(0)


def test_a_checkpoint_of_sequential_experts_goes_on_alike_with_grouped_ones(sequential, tmp_path):
    hf, *_ = sequential
    two = "--expert-model-parallel-size 2 --adam-eps 1e-5"
    train(trainer_args(hf, two, dp_size=2, lr=1e-3, save=str(tmp_path / "saved")), save, dp_size=2)
    resumed = {"load": str(tmp_path / "saved"), "finetune": False, "no_load_optim": False}
    expected = run(hf, tmp_path / "sequential.pt", **resumed)
    from safetensors.torch import load_file

    before = load_file(hf / "model.safetensors")
    assert_same_training(run(hf, tmp_path / "grouped.pt", GROUPED, **resumed), expected, before)


@pytest.mark.parametrize("counts", [[5, 0, 3], [0, 0, 8], [8, 0, 0]])
@pytest.mark.parametrize("in_one_storage", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_grouped_product_equals_one_product_for_each_group(counts, in_one_storage, is_transposed, monkeypatch):
    """torch._grouped_mm, as on CUDA; on the CPU it multiplies one by one."""
    from slime.backends.megatron_utils.layers import grouped_experts

    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 2, 16, 24, generator=generator).bfloat16()
    weights = [whole[i, 0] if in_one_storage else whole[i, 0].clone() for i in range(3)]
    matrices = [weight.t() for weight in weights] if is_transposed else weights
    rows = torch.randn(8, 24 if is_transposed else 16, generator=generator).bfloat16()
    offsets = torch.tensor(counts).cumsum(0).int()
    expected = grouped_experts.grouped_product(rows, matrices, counts, offsets)
    monkeypatch.setattr(grouped_experts, "can_group", lambda *_: True)
    found = grouped_experts.grouped_product(rows, matrices, counts, offsets)
    assert torch.equal(found, expected)
    by_hand = [part @ matrix for part, matrix in zip(rows.split(counts), matrices, strict=True)]
    assert torch.equal(expected, torch.cat(by_hand))
    assert (grouped_experts.stacked(matrices).data_ptr() == whole.data_ptr()) == in_one_storage
