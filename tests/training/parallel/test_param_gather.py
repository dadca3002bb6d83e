"""--overlap-param-gather: the second train step of a rollout has the whole first update, whoever reads the weights.

Megatron's hooks wait for the weights of a module that is called; adapters, experts in one product and convolutions of
delta nets are read without a call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.training.parallel.moe_runs import assert_same_training, run
from tests.unit.megatron_fakes import make_hf_model

OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adapters": ("qwen3", "", {"lora_rank": 4, "lora_alpha": 12.0}),
    "adapters, TP 2": ("qwen3", "--tensor-model-parallel-size 2", {"lora_rank": 4, "lora_alpha": 12.0}),
    "experts": ("qwen3_moe", "--moe-grouped-gemm", {"max_tokens_per_gpu": 40}),
    "delta nets": ("qwen3_5_text", "", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_second_step_has_the_whole_update_of_the_first(tmp_path: Path, name: str) -> None:
    family, flags, changes = MODELS[name]
    make_hf_model(tmp_path / "hf", family)
    changes = {"global_batch_size": 6, "ref_load": str(tmp_path / "hf"), **changes}
    expected = run(tmp_path / "hf", tmp_path / "one.pt", **changes)
    found = run(tmp_path / "hf", tmp_path / "two.pt", f"{OVERLAPPED} {flags}", dp=2, **changes)
    assert len(found[0]) == 2
    assert_same_training(found, expected, load_file(tmp_path / "hf" / "model.safetensors"))
