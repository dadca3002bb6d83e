"""--use-pytorch-profiler: which rollouts, ranks and parts of training leave a trace, and what is in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer_world import train, trainer_args
from tests.unit.megatron_fakes import make_hf_model


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path


def traces(hf_path: Path, directory: Path, **flags: Any) -> dict[str, set[str]]:
    """Train on four rollouts; returns the names of what was done in each trace file."""
    flags = {"use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 3} | flags
    args = trainer_args(hf_path, output_dir=str(directory), recompute_old_log_probs=True, **flags)
    train(args, nothing_more, num_rollouts=4)
    return {
        path.name: {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        for path in sorted((directory / "profile").glob("*"))
    }


def nothing_more(actor: Any, records: list[Any]) -> None:
    pass


def is_backward(names: set[str]) -> bool:
    return any("Backward" in name for name in names)


def test_each_part_of_each_chosen_rollout_is_a_trace_of_its_own(hf_path: Path, tmp_path: Path):
    whole = traces(hf_path, tmp_path / "whole")
    assert list(whole) == [f"rollout_{i}_train_overall_rank_0.json.gz" for i in (1, 2)]
    assert all(is_backward(names) for names in whole.values())
    parts = traces(
        hf_path, tmp_path / "parts", profile_target=["train_actor", "train_log_probs"], profile_step_start=2
    )
    assert list(parts) == ["rollout_2_train_actor_rank_0.json.gz", "rollout_2_train_log_probs_rank_0.json.gz"]
    step, log_probs = parts.values()
    assert "aten::mm" in step and "aten::mm" in log_probs
    assert is_backward(step) and not is_backward(log_probs)


def test_only_chosen_ranks_leave_traces(hf_path: Path, tmp_path: Path):
    assert traces(hf_path, tmp_path / "other", profile_ranks=[1]) == {}
    assert traces(hf_path, tmp_path / "off", use_pytorch_profiler=False) == {}
