"""A trainer that slept between two rollouts trains on as if it had not, in layouts whose objects hold many groups."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.training.parallel.layout_world import Case, Job, run_jobs, train
from tests.unit.megatron_fakes import make_hf_model

pytestmark = pytest.mark.timeout(600)
LAYOUTS = {
    "TP 2": Case("--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2": Case("--pipeline-model-parallel-size 2"),
    "DP 2": Case("--overlap-grad-reduce --overlap-param-gather", dp=2),
}


def train_with_sleep(args: argparse.Namespace, rollouts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """As `train`, with a sleep before each rollout."""
    from slime.backends.megatron_utils import actor as actor_module

    trainer = actor_module.MegatronTrainActor
    train_on = trainer.train_on

    def after_a_sleep(self: Any, *values: Any) -> Any:
        buffers = [buffer for chunk in self.state.model for buffer in chunk.buffers]
        self.sleep()
        assert not torch.distributed.is_initialized()
        assert all(buffer.grad_data.untyped_storage().size() == 0 for buffer in buffers), "gradients take memory"
        self.wake_up()
        return train_on(self, *values)

    # The saver moves CUDA memory only; on CPU the groups and the gradients are what a sleep changes.
    with mock.patch.object(actor_module, "memory_saver"), mock.patch.object(trainer, "train_on", after_a_sleep):
        return train(args, rollouts)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sleep")
    hf_path = root / "hf"
    make_hf_model(hf_path)
    jobs = []
    for name, case in LAYOUTS.items():
        jobs.append(Job(f"{name} awake", case.args(hf_path), train, ((0, 1),)))
        jobs.append(Job(f"{name} slept", case.args(hf_path, offload_train=True), train_with_sleep, ((0, 1),)))
    run_jobs(jobs, root)
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_and_weights_after_a_sleep_are_those_without_it(results: Path, name: str) -> None:
    errors = [path.read_text() for path in results.glob("*.error")]
    assert not errors, errors[0]
    awake, slept = (torch.load(results / f"{name} {kind}.pt", weights_only=False) for kind in ("awake", "slept"))
    for rollout_id in (0, 1):
        assert slept[rollout_id]["steps"] == awake[rollout_id]["steps"]
        weights = awake[rollout_id]["weights"]
        assert all(torch.equal(tensor, weights[key]) for key, tensor in slept[rollout_id]["weights"].items())
