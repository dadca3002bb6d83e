"""Megatron behind a tower of transformers: three steps with images equal those of FSDP2, over every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integration.trainer_world import make_train_data, resumed_from, trainer_args, with_images
from tests.unit.megatron_fakes import make_hf_model, run_world
from tests.unit.test_fsdp import MEGATRON, assert_equal_runs, run
from tests.unit.test_fsdp_images import IMAGES, loaded, models, theirs

STEPS = {"num_steps": 3, **IMAGES}
TP_PP = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
__all__ = ["models"]


@pytest.fixture(scope="module")
def references(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What FSDP2, which is compared with transformers, makes of each model."""
    root = tmp_path_factory.mktemp("references")
    for name, hf in models.items():
        run(hf, out=root / name, **STEPS)
    return {name: root / name for name in models}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("qwen3_vl", 1, ""),
        ("qwen3_vl", 2, ""),
        ("qwen3_vl", 4, TP_PP),
        ("qwen3_vl", 2, "--context-parallel-size 2"),
        ("qwen2_5_vl", 2, "--tensor-model-parallel-size 2"),
    ],
)
def test_steps_with_images_equal_those_of_fsdp(
    models: dict[str, Path], references: dict[str, Path], tmp_path: Path, family: str, world: int, layout: str
) -> None:
    run(models[family], backend="megatron", world=world, megatron=layout, out=tmp_path / "out", **STEPS)
    assert_equal_runs(references[family], tmp_path / "out")


@pytest.mark.processes
def test_a_frozen_tower_stays_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    frozen: dict[str, Any] = {**STEPS, "num_steps": 1, "freeze_vision_tower": True}
    run(models["qwen3_vl"], backend="megatron", out=tmp_path / "out", **frozen)
    _, before, after = torch.load(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) == name.startswith("model.visual.") for name in before)


@pytest.mark.processes
def test_a_resumed_run_goes_on_with_the_tower_and_its_export_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    hf, saved = models["qwen3_vl"], {"save": str(tmp_path / "save"), "save_hf": str(tmp_path / "hf")}
    run(hf, backend="megatron", out=tmp_path / "whole", **STEPS, **saved)
    rest = {**STEPS, "first": 2, "num_steps": 1, **resumed_from(saved["save"])}
    run(hf, backend="megatron", out=tmp_path / "rest", **rest)
    (records, _, after), (records2, before2, after2) = (torch.load(tmp_path / name) for name in ("whole", "rest"))
    exported = loaded(tmp_path / "hf").state_dict()
    assert all(torch.equal(exported[name], before2[name]) for name in before2)
    assert set(before2) == set(exported) - {"lm_head.weight"}
    assert records[-len(records2) :] == records2 and all(torch.equal(after[name], after2[name]) for name in after)


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["", "--context-parallel-size 2"])
def test_qwen3_5_has_the_log_probs_of_transformers(tmp_path: Path, layout: str) -> None:
    """Its layers with a state are not FSDP2's, and half of each head rotates, by three kinds of positions."""
    sections = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope = {**sections, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    make_hf_model(tmp_path / "hf", "qwen3_5", rope_parameters=rope)
    args = trainer_args(tmp_path / "hf", f"{MEGATRON} {layout}", **IMAGES)
    run_world(2 if layout else 1, _log_probs, args)


def _log_probs(args: Any) -> None:
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.ray.rollout.shares import split_train_data
    from slime.training.micro_batches import to_tensors

    actor = MegatronTrainActor(args, rank=0, world_size=0, master_addr="", master_port=0)
    with mock.patch.object(initialize, "init"):
        actor.init()
    data, hf = with_images(make_train_data()), loaded(args.load)
    data["tokens"][6][-1] = 7  # transformers would take the word for an image
    layout = actor.parallel_config()
    share: Any = to_tensors(dict(split_train_data(args, data, layout)[0]), torch.device("cpu"))
    found = actor.backend.forward(actor.backend.micro_batches(share), ["log_probs"])["log_probs"]
    for place, log_probs in zip(share["partition"], found, strict=True):
        torch.testing.assert_close(log_probs, theirs(hf, data, place)[1], atol=1e-4, rtol=0)
