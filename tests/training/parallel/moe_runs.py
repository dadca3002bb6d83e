"""One train step of a tiny model with experts, in a world of its own, and the comparison of two such runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import train, trainer_args
from tests.training.parallel.layout_world import hf_tensors


def save_result(actor: Any, records: list[Any], path: Path) -> None:
    """A check of `train`: (metrics of the train steps, HF tensors after them) go to `path`."""
    steps = [record for record, axis in records if axis == "train/step"]
    tensors = hf_tensors(actor.args, actor.state.model)
    if torch.distributed.get_rank() == 0:
        torch.save((steps, tensors), path)


def run(hf: Path, out: Path, flags: str = "", *, dp: int = 1, **overrides: Any) -> tuple[list[Any], dict[str, Any]]:
    """(metrics of the train steps, HF tensors after the training) of one run."""
    args = trainer_args(hf, f"{flags} --adam-eps 1e-5", dp_size=dp, lr=1e-3, clip_grad=1.0, **overrides)
    train(args, save_result, out, dp_size=dp)
    found: tuple[list[Any], dict[str, Any]] = torch.load(out)
    return found


def assert_same_training(found: Any, expected: Any, before: dict[str, torch.Tensor]) -> None:
    """Loss and gradient norm within 1e-5, the update of every tensor within a thousandth."""
    (steps, tensors), (expected_steps, expected_tensors) = found, expected
    for step, expected_step in zip(steps, expected_steps, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert step[key] == pytest.approx(expected_step[key], rel=1e-5), key
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        update, expected_update = tensor - before[name], expected_tensors[name] - before[name]
        assert (update - expected_update).norm() <= 1e-3 * expected_update.norm() + 1e-12, name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in tensors.items())
