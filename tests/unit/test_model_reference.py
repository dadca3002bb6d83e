"""The page of model families is what the rules and the tests say."""

from __future__ import annotations

from slime.models.hf_config import SUPPORTED_MODEL_TYPES
from tools.make_model_reference import DEFAULT_OUTPUT, axes_of, quantized, render


def test_the_page_of_model_families_is_up_to_date() -> None:
    page = DEFAULT_OUTPUT.read_text()
    assert page == render(), "stale: run python tools/make_model_reference.py"
    assert all(f"| `{name}` |" in page for name in SUPPORTED_MODEL_TYPES)


def test_an_axis_of_one_rank_is_none() -> None:
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    assert axes_of(flags) == {"TP"} and axes_of("--context-parallel-size 4", dp=2) == {"CP", "DP"}


def test_what_stays_as_it_is_in_fp8_is_named() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"]
    assert quantized(names) == "yes"
    assert quantized([*names, "model.layers.0.mlp.w1.weight"]) == "all but `mlp.w1`"
