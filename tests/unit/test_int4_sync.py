"""What a trainer syncs to int4 engines is what the converter writes, byte by byte; what cannot work is said before."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import (
    QuantizationError,
    planned,
    quantize_bucket,
    stored_bytes,
)
from slime.backends.sglang_utils.quantized_layers import _scale_place, _Stored
from slime.config.sglang.served_models import cut_blocks, quantization_problems
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan
from slime.conversion.reader import TensorInfo
from slime.plan import Facts, make_plan
from slime.utils.errors import UsageError
from slime.weights.formats import EXPERTS_ONLY, Int4Format, format_of_checkpoint, quantized_parts, weight_format_of
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.plan_fakes import CUDA, plan_args
from tests.unit.test_fp8 import layer_bucket, tensors_of
from tests.unit.test_fp8_engines import QWEN3_30B
from tools import convert_hf_to_int4_direct, convert_k2_thinking_int4_to_bf16

GROUPS: dict[str, Any] = {
    "group_0": {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": 32,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "group",
            "symmetric": True,
            "type": "int",
        },
    }
}
KIMI_K2_THINKING = {
    "config_groups": GROUPS,
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""As its config.json has it."""


def sync_and_export(args: Namespace, unquantized: Path, out: Path) -> None:
    """A trainer with the unquantised weights; what it syncs to engines of the int4 checkpoint is that checkpoint."""
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.weights.names import expected_hf_names

    model = [get_model_provider_func(args)().bfloat16()]
    load_hf_weights(args, model, unquantized)
    size = args.update_weight_buffer_size
    buckets = list(iter_hf_buckets(args, model, buffer_size=size))
    assert len(buckets) > 2 and all(sum(tensor.nbytes for _, tensor in bucket) <= size for bucket in buckets)
    sent = dict(pair for bucket in buckets for pair in bucket)
    stored = tensors_of(Path(args.hf_checkpoint))
    assert sent.keys() == stored.keys() == expected_hf_names(Path(args.hf_checkpoint))
    for name, tensor in stored.items():
        assert sent[name].dtype == tensor.dtype and torch.equal(sent[name].cpu(), tensor), name
    save_hf(args, model, out)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "flags", "rules"),
    [
        ("qwen3", "--tensor-model-parallel-size 2", ()),
        ("qwen3", "", ("--ignore-rules", "lm_head", "re:.*self_attn.*", "model.layers.1.mlp.down_proj")),
        ("qwen3_moe", "--expert-model-parallel-size 2", ()),
        ("deepseek_v3", "", ()),
    ],
)
def test_a_sync_sends_the_bytes_that_the_converter_writes(
    tmp_path: Path, family: str, flags: str, rules: tuple[str, ...]
) -> None:
    sizes = {} if family in ("qwen3", "deepseek_v3") else {"moe_intermediate_size": 32}
    make_hf_model(tmp_path / "hf", family, dtype="bfloat16", **sizes)
    base = ["--model-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/int4", "--group-size", "8", *rules]
    assert convert_hf_to_int4_direct.main(base) == 0
    args = make_args(tmp_path / "int4", flags, update_weight_buffer_size=12_000)
    run_world(args.actor_num_gpus_per_node, sync_and_export, args, tmp_path / "hf", tmp_path / "out")
    exported, stored = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "int4")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    assert format_of_checkpoint(tmp_path / "out") == format_of_checkpoint(tmp_path / "int4")


def read_both(args: Namespace, bf16: Path) -> None:
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    models = [get_model_provider_func(args)().bfloat16() for _ in range(2)]
    load_hf_weights(args, models[:1], args.hf_checkpoint)
    load_hf_weights(args, models[1:], bf16)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.processes
def test_a_trainer_starts_from_an_int4_checkpoint_as_from_the_bf16_made_of_it(tmp_path: Path) -> None:
    make_hf_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16", moe_intermediate_size=32)
    base = ["--model-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/int4", "--group-size", "16"]
    assert convert_hf_to_int4_direct.main(base) == 0
    back = ["--model-dir", f"{tmp_path}/int4", "--output-dir", f"{tmp_path}/bf16"]
    assert convert_k2_thinking_int4_to_bf16.main(back) == 0
    run_world(1, read_both, make_args(tmp_path / "int4"), tmp_path / "bf16")


def test_a_bucket_is_quantized_together_as_its_tensors_are_by_themselves_and_planned_so() -> None:
    fmt, bucket = Int4Format(group_size=2), layer_bucket()
    found = quantize_bucket(bucket, fmt)
    alone = [pair for item in bucket for pair in quantize_bucket([item], fmt)]
    assert [name for name, _ in found] == [name for name, _ in alone]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, alone, strict=True))
    assert stored_bytes(bucket, fmt) == sum(tensor.nbytes for _, tensor in found)
    infos = planned({name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in bucket}, fmt)
    assert list(infos.items()) == [(name, TensorInfo(t.dtype, tuple(t.shape))) for name, t in found]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_or_does_not_divide_is_named(bad: float) -> None:
    bucket = layer_bucket()
    bucket[3][1][5, 2] = bad
    with pytest.raises(QuantizationError, match=r"down_proj.weight has a weight that is infinite or no number"):
        quantize_bucket(bucket, Int4Format(group_size=2))
    with pytest.raises(QuantizationError, match=r"gate_proj.weight has the shape \[8, 6\], .* groups of 4 columns"):
        quantize_bucket(layer_bucket(), Int4Format(group_size=4))


def test_the_format_of_kimi_k2_thinking_is_understood_and_quantizes_experts_alone() -> None:
    fmt = weight_format_of({"quantization_config": KIMI_K2_THINKING})
    assert isinstance(fmt, Int4Format) and fmt.group_size == 32 and quantized_parts(fmt) == ("experts",)
    layer = "model.layers.3."
    left = ("self_attn.kv_b_proj", "mlp.shared_experts.up_proj", "mlp.down_proj", "mlp.gate")
    assert not any(fmt.quantizes(f"{layer}{name}.weight") for name in left)
    assert fmt.quantizes(layer + "mlp.experts.383.gate_proj.weight")
    # SGLang takes the end of a path for it, too.
    assert not Int4Format(ignored=("mlp.down_proj",)).quantizes(layer + "mlp.down_proj.weight")


def changed(**weights: Any) -> dict[str, Any]:
    group = GROUPS["group_0"]
    return KIMI_K2_THINKING | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (changed(num_bits=8), "with 8 bits"),
        (changed(symmetric=False), "zero points"),
        (changed(actorder="group"), "actorder 'group'"),
        (changed(strategy="channel"), "strategy 'channel'"),
        (changed(group_size=0), "group_size 0"),
        (changed(group_size=12), "group_size 12"),
        (KIMI_K2_THINKING | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (
            KIMI_K2_THINKING | {"config_groups": GROUPS | {"more": {"targets": ["Embedding"]}}},
            "'Embedding'",
        ),
        (KIMI_K2_THINKING | {"linear_fp8_config": {"quant_method": "fp8"}}, "linear_fp8_config"),
    ],
)
def test_another_kind_of_int4_is_refused_with_its_reason(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        weight_format_of({"quantization_config": config})


@pytest.mark.parametrize(
    ("tp", "settings", "group", "bad"),
    [
        (4, {}, 32, {}),  # 768 / 4 = 192 = 3 x 64
        (8, {}, 32, {"moe_intermediate_size": 96}),  # whole groups of 32, but no whole tiles of 64 rows
        (8, {"ep_size": 8}, 32, {}),  # each rank has whole experts
        (1, {}, 48, {"hidden_size": 4096}),  # 4096 is no multiple of 48
    ],
)
def test_a_rank_with_a_part_of_a_group_or_of_a_tile_is_named(
    tp: int, settings: dict[str, int], group: int, bad: dict[str, int]
) -> None:
    fmt = Int4Format(group_size=group, ignored=EXPERTS_ONLY)
    found = cut_blocks(QWEN3_30B, fmt, (64, 64 if group == 32 else 192), tp, settings)
    assert found == bad


def problems_of(path: Path, size: int = 1, settings: dict[str, Any] | None = None, **flags: Any) -> list[str]:
    fmt = Int4Format(ignored=EXPERTS_ONLY)
    (path / "config.json").write_text(json.dumps(QWEN3_30B | {"quantization_config": fmt.config()}))
    usual = {"accelerator": "cuda", "debug_rollout_only": False, "rollout_external": False}
    group = EngineGroupPlan("regular", size, size, 0, settings or {})
    args = Namespace(**(usual | flags))
    return quantization_problems(args, [ModelPlan("default", str(path), True, (group,))]).all()


def test_engines_that_could_not_take_int4_weights_are_refused_with_numbers_and_a_remedy(tmp_path: Path) -> None:
    assert problems_of(tmp_path, 4) == []
    (sentence,) = problems_of(tmp_path, 8)
    assert "--rollout-num-gpus-per-engine 8" in sentence and "group_size 32" in sentence
    assert (
        "moe_intermediate_size is 96" in sentence
        and "size 1 or 2 or 3 or 4" in sentence
        and "--ignore-rules" in sentence
    )
    assert problems_of(tmp_path, 8, accelerator="cpu") == []  # no tiles there, and 96 = 3 x 32
    (sentence,) = problems_of(tmp_path, rollout_external=True)
    assert "--rollout-external-engine-addrs" in sentence and "int4" in sentence
    (sentence,) = problems_of(tmp_path, settings={"moe_runner_backend": "flashinfer_trtllm"})
    assert "--sglang-moe-runner-backend flashinfer_trtllm" in sentence and "marlin or triton" in sentence
    assert problems_of(tmp_path, rollout_external=True, debug_rollout_only=True) == []


def test_a_plan_counts_experts_in_half_a_byte_and_their_scales() -> None:
    sizes = {"num_moe_experts": 128, "moe_ffn_hidden_size": 768, "moe_router_topk": 8}
    fmt = Int4Format(ignored=EXPERTS_ONLY)
    plain, int4 = (make_plan(plan_args(**(CUDA | sizes)), facts) for facts in (Facts(), Facts(weight_format=fmt)))
    assert plain.params is not None and plain.transport is not None and int4.transport is not None
    experts = plain.params["experts"]
    assert plain.transport.num_bytes - int4.transport.num_bytes == 2 * experts - experts // 2 - 2 * (experts // 32)
    assert "as int4" in int4.transport.way
    part = experts // int4.engine_memory[0].tp
    assert plain.engine_memory[0].weights - int4.engine_memory[0].weights == 2 * part - part // 2 - 2 * (part // 32)


def test_rows_that_come_one_part_after_the_other_are_placed_as_all_at_once_would_be() -> None:
    """The scales, whose order is plain torch; that of the values is a CUDA kernel's (tests/gpu/test_int4.py)."""
    from slime.backends.sglang_utils import cpu_standins

    cpu_standins.install()
    from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales

    scales = torch.randn(4, 192)  # 4 groups of 32 columns; gate has 64 rows, up 128
    placed, place = torch.empty(4, 192), _scale_place(128, 32)
    place(placed, 64, scales[:, 64:])
    place(placed, 0, scales[:, :64])
    assert torch.equal(placed, marlin_permute_scales(scales, 128, 192, 32))


def test_where_a_part_goes_is_what_the_loader_does_with_ones() -> None:
    param = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.int32), requires_grad=False)
    param.half = 4  # type: ignore[attr-defined]
    stored = _Stored(param)

    def load(target: Any, loaded: torch.Tensor) -> torch.Tensor:
        target.data[target.half :].copy_(loaded)
        data: torch.Tensor = target.data
        return data

    calls = []

    def ones() -> torch.Tensor:
        calls.append(1)
        return load(stored.empty(shares_first=False), torch.ones(4, 3, dtype=torch.int32))

    assert [stored.rows("up", 0, ones) for _ in range(2)] == [(4, 8)] * 2 and len(calls) == 1
    shared = stored.empty(shares_first=True)
    shared.data[5].copy_(torch.full((3,), 7))
    assert shared.data[0].tolist() == [7, 7, 7] and shared.untyped_storage().nbytes() == 12
