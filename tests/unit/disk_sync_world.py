"""A trainer whose weights are sent over files, and an engine that loads them into a dictionary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.update_weight import base, build_weight_updater
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.backends.sglang_utils import disk_weights
from slime.backends.sglang_utils.weight_samples import describe, sample

NAMES = [f"layer.{i}.weight" for i in range(3)]


class FileEngine:
    """Loads versions as an engine does, into a dictionary."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.spoil: list[Any] = []
        """Functions of a version's directory, called before it is loaded, one a load."""

    def pause(self, mode: str) -> None:
        self.calls.append("pause")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def continue_generation(self) -> None:
        self.calls.append("continue")

    def set_weight_version(self, version: str) -> str:
        self.version = version
        return version

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in tensors}

    def update_weights_from_disk(
        self, path: str, *, weight_version: str, local_dir: str | None = None, timeout_s: float
    ) -> str:
        self.calls.append(f"load {Path(path).name}")
        self.timeout_s = timeout_s
        if self.spoil:
            self.spoil.pop(0)(Path(path))
        problem = disk_weights.load(Path(path), self.load_weights, Path(local_dir) if local_dir else None)
        if problem:
            raise RuntimeError(problem)
        self.version = weight_version
        return weight_version

    def sample_weights(self, names: list[str]) -> list[dict[str, str]]:
        return [{name: describe((4,), sample(self.weights[name])) for name in names if name in self.weights}]


class World:
    """A trainer whose weights a test may change, an HF checkpoint, and the shared directory."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = {name: torch.full((4,), float(i)) for i, name in enumerate(NAMES)}
        self.checkpoint, self.shared = tmp_path / "model", tmp_path / "shared"
        self.checkpoint.mkdir()
        save_file(self.weights, self.checkpoint / "model.safetensors")
        (self.checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
        (self.checkpoint / "tokenizer.json").write_text("{}")
        monkeypatch.setattr(base, "iter_hf_buckets", self.buckets)

    def buckets(self, args: Any, model: Any, *, buffer_size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return iter([[item] for item in self.weights.items()])

    def updater(self, *engines: FileEngine, connect: bool = True, **values: Any) -> DiskWeightUpdater:
        args = {
            "update_weight_transport": "disk",
            "train_backend": "megatron",
            "multimodal_keys": None,
            "update_weight_mode": "full",
            "update_weight_disk_dir": str(self.shared),
            "update_weight_disk_keep_files": False,
            "update_weight_local_checkpoint_dir": None,
            "custom_update_weight_post_write_path": None,
            "output_dir": "runs/mine",
            "update_weights_in_flight": False,
            "update_weight_buffer_size": 16,
            "distributed_timeout_minutes": 1.0,
            "hf_checkpoint": str(self.checkpoint),
            "mtp_num_layers": None,
            "check_weight_update_equal": False,
        }
        made = build_weight_updater(SimpleNamespace(**(args | values)), [], colocated=False)
        assert isinstance(made, DiskWeightUpdater)
        if connect:
            made.connect(engines, engine_sizes=[1] * len(engines))
        return made
