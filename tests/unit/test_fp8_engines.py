"""Engines that cannot serve a checkpoint in fp8, or cannot take weights in it: what is said before they start."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.config.sglang.served_models import cut_blocks, quantization_problems
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan
from slime.ray.driver import find_format
from slime.weights.formats import Fp8Format
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

QWEN3_8B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
}
QWEN3_30B = QWEN3_8B | {"num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768}
MINIMAX = {
    **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 3072},
    **{"intermediate_size": 1536, "num_hidden_layers": 62, "num_local_experts": 256},
}
DEEPSEEK = {
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "tp", "settings", "bad"),
    [
        (QWEN3_8B, 1, {}, {}),
        (QWEN3_8B, 16, {}, {}),  # 8 key heads on 16 ranks: a whole one each
        (QWEN3_8B, 64, {}, {"the query heads": 64, "the attention's output": 64, "intermediate_size": 192}),
        (QWEN3_30B, 4, {}, {"moe_intermediate_size": 192}),  # of the dense width there is no layer
        (QWEN3_30B, 4, {"ep_size": 4}, {}),  # each rank has whole experts
        (QWEN3_8B | {"head_dim": 64, "num_key_value_heads": 1}, 1, {}, {"the key heads": 64}),
        (QWEN3_8B | {"intermediate_size": 192}, 1, {}, {"intermediate_size": 192}),  # gate and up are one matrix
        (MINIMAX, 8, {}, {"moe_intermediate_size": 192}),  # 1536 / 8
        (DEEPSEEK, 16, {}, {}),
        (DEEPSEEK, 32, {}, {"intermediate_size": 576, "moe_intermediate_size": 64, "the shared experts": 64}),
    ],
)
def test_a_rank_with_a_part_of_a_block_is_named(
    config: dict[str, int], tp: int, settings: dict[str, int], bad: dict[str, int]
) -> None:
    assert cut_blocks(config, Fp8Format(), (128, 128), tp, settings) == bad


def test_modules_that_are_not_quantized_may_be_cut_anywhere() -> None:
    config = QWEN3_8B | {"head_dim": 64, "num_key_value_heads": 1}
    assert cut_blocks(config, Fp8Format(unquantized=("self_attn",)), (128, 128), 1, {}) == {}


def problems_of(path: Path, config: dict[str, Any], size: int = 1, **flags: Any) -> Any:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    settings = flags.pop("settings", {})
    args = Namespace(
        **({"accelerator": "cuda", "colocate": False, "debug_rollout_only": False, "rollout_external": False} | flags)
    )
    group = EngineGroupPlan("regular", size, size, 0, settings)
    return quantization_problems(args, [ModelPlan("default", str(path), True, (group,))])


def test_the_sentence_has_the_numbers_and_what_would_do(tmp_path: Path) -> None:
    fp8 = QWEN3_30B | {"quantization_config": FP8}
    (sentence,) = problems_of(tmp_path, fp8, 4).all()
    assert "--rollout-num-gpus-per-engine 4" in sentence and "weight_block_size [128, 128]" in sentence
    assert "moe_intermediate_size is 192" in sentence and "size 1 or 2" in sentence
    assert problems_of(tmp_path, fp8, 2).all() == []
    per_tensor = {key: value for key, value in FP8.items() if key != "weight_block_size"}
    assert problems_of(tmp_path, QWEN3_30B | {"quantization_config": per_tensor}, 4).all() == []
    assert problems_of(tmp_path, QWEN3_30B | {"quantization_config": {"quant_method": "awq"}}, 4).all() == []


def test_what_engines_quantize_themselves_cannot_take_weights(tmp_path: Path) -> None:
    by_engine = {"settings": {"quantization": "fp8"}}
    (sentence,) = problems_of(tmp_path, QWEN3_8B, **by_engine).wrong
    assert "--sglang-quantization fp8" in sentence and "tools/convert_hf_to_fp8.py" in sentence
    assert problems_of(tmp_path, QWEN3_8B, debug_rollout_only=True, **by_engine).all() == []
    assert problems_of(tmp_path, QWEN3_8B | {"quantization_config": FP8}, **by_engine).all() == []


def test_a_command_line_with_such_an_engine_is_refused(check: Check) -> None:
    line = "--accelerator cuda --dry-run --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --sglang-quantization fp8"
    has(check(line).problems.wrong, "--sglang-quantization fp8: SGLang quantises as it loads")


def test_a_plan_knows_the_format_and_goes_on_without_one_that_is_refused(tmp_path: Path) -> None:
    for config, expected in ((FP8, Fp8Format()), ({"quant_method": "awq"}, None), (None, None)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        assert find_format(str(tmp_path)) == expected
    assert find_format(None) is None
