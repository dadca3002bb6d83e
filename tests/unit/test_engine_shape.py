"""Engines that cannot divide their model, and engines that had too little memory: what is said of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_engine import memory_advice
from slime.config.sglang.served_models import shape_problems, undivided
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

QWEN3_06B = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}


@pytest.mark.parametrize(
    ("config", "tp", "settings", "bad"),
    [
        (QWEN3_06B, 16, {}, {}),  # 8 key heads on 16 ranks: two ranks keep each
        (QWEN3_06B, 3, {}, {"num_attention_heads": 16, "num_key_value_heads": 8}),
        (SMOLLM2, 2, {}, {"num_attention_heads": 9, "num_key_value_heads": 3}),
        (SMOLLM2, 2, {"enable_dp_attention": True, "dp_size": 2}, {}),  # each rank has all heads
        (SMOLLM2, 9, {}, {"intermediate_size": 1536}),
        (QWEN3_06B | {"num_experts": 8, "moe_intermediate_size": 6}, 4, {}, {"moe_intermediate_size": 6}),
        (QWEN3_06B | {"num_experts": 8, "moe_intermediate_size": 6}, 4, {"ep_size": 2}, {}),  # 2 ranks an expert
    ],
)
def test_what_ranks_cannot_divide_is_named(
    config: dict[str, int], tp: int, settings: dict[str, int], bad: dict[str, int]
) -> None:
    assert undivided(config, tp, settings) == bad


def plan(path: Path, size: int, **settings: Any) -> list[ModelPlan]:
    group = EngineGroupPlan("regular", size, size, 0, settings)
    return [ModelPlan("default", str(path), True, (group, group))]


def test_a_pipeline_leaves_fewer_ranks_to_divide_by_and_a_sentence_comes_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": SMOLLM2}))
    assert shape_problems(plan(tmp_path, 3)) == []
    assert shape_problems(plan(tmp_path, 6, pp_size=2)) == []
    (sentence,) = shape_problems(plan(tmp_path, 4))
    assert "the 4 tensor-parallel ranks" in sentence and "num_attention_heads 9 and num_key_value_heads 3" in sentence
    assert sentence.endswith("sizes below it that can: 1, 3.")
    assert shape_problems(plan(tmp_path / "not-here", 4)) == []


def test_a_command_line_with_such_an_engine_is_refused_with_the_numbers(check: Check) -> None:
    line = (
        "--accelerator cuda --dry-run --actor-num-gpus-per-node 1 --rollout-num-gpus 3 --rollout-num-gpus-per-engine 3"
    )
    has(check(line).problems.wrong, "the 3 tensor-parallel ranks of an engine cannot divide num_attention_heads 4")


def test_a_model_that_the_pinned_sglang_cannot_start_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B | {"model_type": "olmo3"}))
    (sentence,) = shape_problems(plan(tmp_path, 1))
    assert "SGLang serves no olmo3" in sentence and sentence.endswith("take another model.")


# ---- too little memory; the lines are those of SGLang 0.5.17 and torch

OUT_OF_MEMORY = (
    "Load weight begin. avail mem=60.00 GB\n"
    "Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.97 GiB. GPU 0 has a total capacity of 139.80 "
    "GiB of which 998.00 MiB is free. Process 123 has 78.30 GiB memory in use. Including non-PyTorch memory, this "
    "process has 60.10 GiB memory in use.\n"
)
NO_CACHE = (
    "[2026] Load weight begin. avail mem=40.00 GB\n"
    "[2026] Load weight end. elapsed=3.10 s, type=Qwen3ForCausalLM, avail mem=31.90 GB, mem usage=8.10 GB.\n"
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
    "mem_fraction_static=0.2\n"
)


def test_an_engine_out_of_memory_says_which_flag_to_lower_and_to_what() -> None:
    advice = memory_advice(OUT_OF_MEMORY, {"mem_fraction_static": 0.9})
    # missing 2.97 - 998 / 1024 = 2.00 GiB of 139.8, and 2% beyond it: 0.9 - 0.0143 - 0.02, rounded down
    assert advice is not None and "--sglang-mem-fraction-static 0.9" in advice and "lower it to 0.86" in advice
    assert "other processes hold 78.3 GiB" in advice and "--sglang-cuda-graph-max-bs" in advice


def test_the_fraction_that_sglang_chose_is_read_from_what_it_printed() -> None:
    log = "server_args=ServerArgs(model_path='m', mem_fraction_static=0.873, tp_size=1)\n" + OUT_OF_MEMORY
    advice = memory_advice(log, {})
    assert advice is not None and "--sglang-mem-fraction-static 0.873" in advice and "lower it to 0.83" in advice
    unknown = memory_advice(OUT_OF_MEMORY, {})
    assert unknown is not None and "lower --sglang-mem-fraction-static" in unknown


def test_a_gpu_that_others_fill_is_not_blamed_on_the_fraction() -> None:
    full = OUT_OF_MEMORY.replace("2.97 GiB", "90.00 GiB")
    advice = memory_advice(full, {"mem_fraction_static": 0.5})
    assert advice is not None and "no value of --sglang-mem-fraction-static helps" in advice


def test_weights_that_leave_no_room_for_the_cache_say_what_to_raise_it_to() -> None:
    # the weights took 8.1 of 40 GB; with 2 GB of cache and 2% more: (8.1 + 2) / 40 + 0.02 = 0.2725, rounded up
    advice = memory_advice(NO_CACHE, {"mem_fraction_static": 0.2})
    assert advice is not None and "raise it to 0.28 or more" in advice and "8.1 GB" in advice
    too_large = memory_advice(NO_CACHE.replace("avail mem=31.90", "avail mem=1.90"), {"mem_fraction_static": 0.2})
    assert too_large is not None and "raise --rollout-num-gpus-per-engine" in too_large


def test_weights_that_take_all_of_the_share_say_the_same() -> None:
    # the line that SGLang 0.5.17 wrote on an H200; (8.1 + 2) / 40 + 0.02 = 0.2725, rounded up
    line = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.0001. Raise"
    advice = memory_advice("\n".join([*NO_CACHE.splitlines()[:2], line]), {"mem_fraction_static": 0.0001})
    assert advice is not None and "0.0001: of 40.0 GB" in advice and "raise it to 0.28 or more" in advice


def test_a_gpu_without_room_for_a_context_is_held_by_another_process() -> None:
    advice = memory_advice("RuntimeError: CUDA error: out of memory\n", {"mem_fraction_static": 0.5})
    assert advice is not None and "another process holds the GPU's memory" in advice


def test_a_gpu_with_room_for_nothing_but_a_context_is_held_by_another_process() -> None:
    # as on an H200 of which another process had left 0.7 GB: the engine began, and its weights (tiny) fitted
    log = NO_CACHE.replace("avail mem=40.00", "avail mem=0.04").replace("avail mem=31.90", "avail mem=0.03")
    advice = memory_advice(log, {"mem_fraction_static": 0.5})
    assert advice is not None and advice.startswith("another process holds the GPU: 0.0 GB of it were free")


def test_another_failure_gets_no_advice_about_memory() -> None:
    assert memory_advice("AssertionError: head_dim", {}) is None


@pytest.mark.parametrize(
    ("experts", "settings", "sentence"),
    [
        (8, {"ep_size": 2}, None),
        (8, {"ep_size": 3}, "must divide the 4 tensor-parallel ranks of an engine"),
        (6, {"ep_size": 4}, "and the 6 experts of {path}; sizes that do: 1, 2."),
        (6, {"ep_size": 4, "ep_num_redundant_experts": 2}, None),
        (8, {"ep_size": 16, "moe_a2a_backend": "deepep"}, None),
        (0, {"ep_size": 2}, "--sglang-ep-size 2: {path} has no experts; leave it out."),
    ],
)
def test_experts_are_shared_by_sizes_that_divide_ranks_and_experts(
    tmp_path: Path, experts: int, settings: dict[str, Any], sentence: str | None
) -> None:
    config = QWEN3_06B | ({"num_experts": experts, "moe_intermediate_size": 64} if experts else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = shape_problems(plan(tmp_path, 4, **settings))
    assert [sentence.format(path=tmp_path) in text for text in found] == [True] if sentence else found == []
