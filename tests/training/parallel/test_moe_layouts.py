"""A model with experts trains alike on one process and with its experts spread over several.

The same weights and the same rollout, one train step: loss and gradient norm within 1e-5 relative, and the update of
every tensor within 1e-3 of its norm (learning rate 1e-3, Adam's epsilon 1e-5, fp32). Tensors are compared under their
HF names, as they are exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import train, trainer_args
from tests.unit.megatron_fakes import make_hf_model

TOLERANCE = {"loss": 1e-5, "grad_norm": 1e-5, "update": 1e-3}


def hf_tensors(args: Any, model: list[Any]) -> dict[str, torch.Tensor]:
    from slime.backends.megatron_utils.hf_weight_iterator import iter_hf_buckets

    return {n: t.clone() for bucket in iter_hf_buckets(args, model, buffer_size=1 << 30) for n, t in bucket}


def save_result(actor: Any, records: list[Any], path: Path) -> None:
    steps = [record for record, axis in records if axis == "train/step"]
    tensors = hf_tensors(actor.args, actor.state.model)
    if torch.distributed.get_rank() == 0:
        torch.save((steps, tensors), path)


def run(hf: Path, out: Path, flags: str = "", *, dp: int = 1, **overrides: Any) -> tuple[list[Any], dict[str, Any]]:
    """(metrics of the train steps, HF tensors after the training) of one run."""
    args = trainer_args(hf, f"{flags} --adam-eps 1e-5", dp_size=dp, lr=1e-3, clip_grad=1.0, **overrides)
    train(args, save_result, out, dp_size=dp)
    return torch.load(out)


def assert_same_training(found: Any, expected: Any, before: dict[str, torch.Tensor]) -> None:
    (steps, tensors), (expected_steps, expected_tensors) = found, expected
    for step, expected_step in zip(steps, expected_steps, strict=True):
        for name in ("loss", "grad_norm"):
            key = f"train/{name}"
            assert step[key] == pytest.approx(expected_step[key], rel=TOLERANCE[name]), key
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        update, expected_update = tensor - before[name], expected_tensors[name] - before[name]
        assert (update - expected_update).norm() <= TOLERANCE["update"] * expected_update.norm() + 1e-12, name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in tensors.items())


LAYOUTS = {
    "EP 2": ("--expert-model-parallel-size 2", {"dp": 2}),
    "ETP 2 without TP": ("--expert-tensor-parallel-size 2", {"dp": 2}),
    "EP 2, split micro-batches": ("--expert-model-parallel-size 2", {"dp": 2, "max_tokens_per_gpu": 40}),
    "DP 2": ("", {"dp": 2}),
}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
FOUR_PROCESSES = {
    "TP 2 x EP 2, ETP 1": (f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", {"dp": 2}),
    "TP 2 x EP 2, ETP 2": (f"{TP2} --expert-model-parallel-size 2", {"dp": 2}),
    "TP 2, ETP 1": (f"{TP2} --expert-tensor-parallel-size 1", {"dp": 2}),
    "EP 4": ("--expert-model-parallel-size 4", {"dp": 4}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FOUR_PROCESSES]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """(HF model, its training on one process, its tensors before)."""
    root = tmp_path_factory.mktemp("single")
    model = make_hf_model(root / "hf", "qwen3_moe")
    del model
    from safetensors.torch import load_file

    return root / "hf", run(root / "hf", root / "out.pt"), load_file(root / "hf" / "model.safetensors")


@pytest.mark.parametrize("name", [*LAYOUTS, *SLOW])
def test_a_layout_trains_as_one_process_does(name, single, tmp_path):
    hf, expected, before = single
    flags, options = (LAYOUTS | FOUR_PROCESSES)[name]
    assert_same_training(run(hf, tmp_path / "out.pt", flags, **options), expected, before)


def save_checkpoint_and_result(actor: Any, records: list[Any], path: Path) -> None:
    actor.save_model(0)
    save_result(actor, records, path)


def test_a_checkpoint_of_experts_on_two_ranks_goes_on_alike_with_all_of_them_on_one(single, tmp_path):
    """Moments included: the step after loading is the one that the two ranks would have made."""
    hf, *_ = single
    two = "--expert-model-parallel-size 2 --adam-eps 1e-5"
    args = trainer_args(hf, two, dp_size=2, lr=1e-3, clip_grad=1.0, save=str(tmp_path / "checkpoint"))
    train(args, save_checkpoint_and_result, tmp_path / "saved.pt", dp_size=2)
    saved = torch.load(tmp_path / "saved.pt")[1]
    resumed = {"load": str(tmp_path / "checkpoint"), "finetune": False}
    expected = run(hf, tmp_path / "two.pt", two, dp=2, no_load_optim=False, **resumed)
    assert_same_training(run(hf, tmp_path / "one.pt", no_load_optim=False, **resumed), expected, saved)
    fresh = run(hf, tmp_path / "fresh.pt", no_load_optim=True, **resumed)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert not torch.allclose(fresh[1][name], expected[1][name], atol=1e-5), "the moments would not matter"
