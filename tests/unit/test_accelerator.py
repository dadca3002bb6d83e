"""The device is chosen once, by name."""

from __future__ import annotations

import pytest
import torch

from slime.utils import accelerator
from slime.utils.errors import UsageError


def test_auto_means_the_gpu_exactly_where_there_is_one(monkeypatch):
    monkeypatch.setattr(accelerator, "cuda_is_available", lambda: True)
    assert accelerator.resolve("auto") == "cuda"
    monkeypatch.setattr(accelerator, "cuda_is_available", lambda: False)
    assert accelerator.resolve("auto") == "cpu"


def test_cuda_without_a_gpu_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(accelerator, "cuda_is_available", lambda: False)
    with pytest.raises(UsageError, match="--accelerator cpu"):
        accelerator.resolve("cuda")
    with pytest.raises(UsageError, match="tpu"):
        accelerator.resolve("tpu")


def test_a_process_cannot_change_its_device(monkeypatch):
    monkeypatch.setattr(accelerator, "_ACTIVE", accelerator._Active())
    accelerator.activate("cpu")
    accelerator.activate("cpu")
    with pytest.raises(RuntimeError, match="cuda"):
        accelerator.activate("cuda")
    assert accelerator.kind() == "cpu"
    assert accelerator.current_device() == torch.device("cpu")
    assert accelerator.process_group_backend("nccl") == "gloo"
    accelerator.set_device(3)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert accelerator.free_share() == 1.0


def test_the_free_share_of_a_gpu_counts_what_all_processes_hold(monkeypatch):
    monkeypatch.setattr(accelerator, "_ACTIVE", accelerator._Active())
    accelerator.activate("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 10**9, 80 * 10**9))
    assert accelerator.free_share() == 20 / 80


def test_the_collective_backend_of_a_gpu_is_the_one_asked_for(monkeypatch):
    monkeypatch.setattr(accelerator, "_ACTIVE", accelerator._Active())
    accelerator.activate("cuda")
    assert accelerator.process_group_backend() == "nccl"
    assert accelerator.process_group_backend("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"


def test_the_build_of_torch_is_told_without_importing_it(monkeypatch, tmp_path):
    assert accelerator.is_built_without_cuda() is (torch.version.cuda is None and torch.version.hip is None)
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [package]})
    )
    assert accelerator.is_built_without_cuda() is False, "torch has to be asked"
    for says, expected in (("cuda = None", True), ("cuda = '13.0'", False), ("cuda = None\nhip = '7.0'", False)):
        (package / "version.py").write_text(says)
        assert accelerator.is_built_without_cuda() is expected
