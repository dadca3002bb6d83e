"""Logits and gradients over two GPUs are as near to HF's as those of one GPU; needs two.

Several micro-batches in bfloat16, over NCCL: stages that do not wait for each other, gathered keys, experts of others.
The same in fp32 over gloo, for every layout: tests/training/parallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.parity_world import of_gpus, relative
from tests.integration.trainer_world import trainer_args
from tests.training.parallel import hf_parity
from tests.unit.megatron_fakes import make_hf_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TP, PP = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
DENSE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 4}
EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "qwen3": (
        DENSE,
        {
            "TP 2": TP,
            "PP 2": PP,
            "PP 2, interleaved": f"{PP} --num-layers-per-virtual-pipeline-stage 1",
            "CP 2": "--context-parallel-size 2",
        },
    ),
    "qwen3_moe": (
        EXPERTS,
        {
            "EP 2": "--expert-model-parallel-size 2",
            "EP 2, TP 2": f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {TP}",
        },
    ),
}
"""Family -> sizes of the model, its layouts."""


@pytest.mark.parametrize("family", MODELS)
def test_two_gpus_are_as_near_to_hf_as_one(tmp_path: Path, family: str) -> None:
    sizes, layouts = MODELS[family]
    expected = hf_parity.of_hf_model(make_hf_model(tmp_path / "hf", family, **sizes), tmp_path / "gradients")
    far: dict[str, dict[str, float]] = {}
    for name, flags in {"one GPU": "", **layouts}.items():
        args = trainer_args(tmp_path / "hf", flags, accelerator="cuda", max_tokens_per_gpu=50)
        found = of_gpus(args, 2 if flags else 1, tmp_path / "found.pt")
        far[name] = {what: relative(found[what], expected[what]) for what in ("logits", "gradients")}
    print(family, far)
    for distances in far.values():
        for what, distance in distances.items():
            assert 0 < distance <= 1.5 * far["one GPU"][what], far
