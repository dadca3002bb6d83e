"""Quantising to fp8 is exact to the last bit, and a checkpoint, a trainer and a weight sync agree on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.kernels.fp8_kernel import blockwise_cast_to_fp8_triton
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import (
    QuantizationError,
    quantize_bucket,
    stored_bytes,
)
from slime.utils.errors import UsageError
from slime.weights.formats import Fp8Format, format_of_checkpoint
from slime.weights.quantization import E4M3, dequantize, quantize_blocks, quantize_tensor, round_up_to_power_of_two
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tools import convert_hf_to_fp8, convert_hf_to_torch_dist, convert_torch_dist_to_hf, fp8_cast_bf16

E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
"""All e4m3 numbers from 0 to 448, in order: position is bit pattern, so an even position is an even mantissa."""


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 number of each float64 in [-448, 448], a tie to the even one: a search, no cast."""
    magnitude = values.abs()
    above = torch.searchsorted(E4M3_VALUES, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = E4M3_VALUES[above] - magnitude, magnitude - E4M3_VALUES[below]
    takes_upper = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_upper, E4M3_VALUES[above], E4M3_VALUES[below]) * values.sign()


def reference(weight: torch.Tensor, block: tuple[int, int], *, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the docstring of the module says, block by block in float64, rounded to fp32 where it says fp32."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float64)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]), dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            part = weight[place].double()
            scale = (part.abs().max().clamp(min=torch.tensor(1e-12).double()) / 448).float()
            if ue8m0:
                scale = (2.0 ** scale.double().log2().ceil()).float()
            factor = (1 / scale.double()).float().double()
            values[place] = nearest_e4m3((part * factor).float().double().clamp(-448, 448))
            scales[i, j] = scale
    return values, scales


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 128), (70, 33), (5, 130), (32, 32)])
def test_blocks_are_quantized_as_in_float64(shape, dtype, ue8m0):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(6).exp()
    weight[0, :5] = torch.tensor([21 / 448, 1.0, -1.0, 0.0, 3 / 448])  # a tie, and its like below the normal range
    weight = weight.to(dtype)
    values, scales = quantize_blocks(weight, (32, 32), ue8m0=ue8m0)
    expected_values, expected_scales = reference(weight, (32, 32), ue8m0=ue8m0)
    assert values.dtype == E4M3 and scales.dtype == torch.float32 and values.is_contiguous()
    assert torch.equal(values.double(), expected_values)
    assert torch.equal(scales.double(), expected_scales)
    # Half of the last of three mantissa bits: 1/16 of a value, or half of the smallest step 2^-9 of the scale.
    by_row = scales.repeat_interleave(32, 0)[: shape[0]].repeat_interleave(32, 1)[:, : shape[1]]
    error = (dequantize(values, scales, (32, 32)) - weight.float()).abs()
    assert (error <= torch.maximum(weight.float().abs() / 16, by_row * 2**-10) * (1 + 1e-6)).all()


def test_a_tensor_is_one_block():
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    values, scale = quantize_tensor(weight)
    expected_values, expected_scale = reference(weight, (40, 24), ue8m0=False)
    assert scale.shape == (1,)
    assert torch.equal(values.double(), expected_values) and scale.double() == expected_scale.flatten()


def test_a_block_of_zeros_comes_back_as_zeros_and_one_of_tiny_values_too():
    for fill in (0.0, 1e-30):
        values, scales = quantize_blocks(torch.full((4, 4), fill), (2, 2))
        assert scales.isfinite().all() and (scales > 0).all()
        assert (dequantize(values, scales, (2, 2)) == 0).all()


def test_powers_of_two_are_rounded_up_to_themselves():
    given = torch.tensor([1.0, 0.25, 1.0000001, 3.0, 2**-40, 2**-40 * 1.5])
    assert round_up_to_power_of_two(given).tolist() == [1.0, 0.25, 2.0, 4.0, 2**-40, 2**-39]


def test_the_public_kernel_takes_blocks_of_128_unless_told_otherwise():
    weight = torch.randn(130, 128, generator=torch.Generator().manual_seed(2))
    for found, block in (
        (blockwise_cast_to_fp8_triton(weight), (128, 128)),
        (blockwise_cast_to_fp8_triton(weight, [64, 32]), (64, 32)),
    ):
        for mine, theirs in zip(found, quantize_blocks(weight, block), strict=True):
            assert torch.equal(mine.float(), theirs.float())


def test_linear_layers_are_quantized_and_nothing_else():
    fmt, layer = Fp8Format(), "model.layers.3."
    for name in (
        *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")),
        "self_attn.kv_a_proj_with_mqa",
        "mlp.gate_proj",
        "mlp.experts.17.down_proj",
        "mlp.shared_experts.up_proj",
    ):
        assert fmt.quantizes(f"{layer}{name}.weight"), name
        assert not fmt.quantizes(f"{layer}{name}.bias"), name
    for name in ("mlp.gate", "self_attn.q_norm", "input_layernorm", "eh_proj", "mlp.shared_expert_gate"):
        assert not fmt.quantizes(f"{layer}{name}.weight"), name
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert not fmt.quantizes(name)


def test_a_module_is_left_alone_by_its_path_or_a_part_of_it():
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1", "self_attn.o_proj", "mlp.gate"]}
    fmt = Fp8Format.of({"quantization_config": config})
    assert fmt is not None and fmt.block_size is None
    quantized = [
        name
        for name in ("0.self_attn.q_proj", "0.self_attn.o_proj", "1.mlp.up_proj", "10.mlp.gate_proj")
        if fmt.quantizes(f"model.layers.{name}.weight")
    ]
    assert quantized == ["0.self_attn.q_proj", "10.mlp.gate_proj"]
    assert Fp8Format.of({"quantization_config": fmt.config()}) == fmt
    assert Fp8Format.of({}) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq"}, "'awq' is not supported"),
        ({"quant_method": "gptq", "bits": 4}, "calibration"),
        ({"quant_method": "bitsandbytes"}, "integers of 4 bits"),
        ({"quant_method": "mxfp8"}, "Blackwell"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "e5m3"}, "scale_fmt 'e5m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ("fp8", "no mapping"),
    ],
)
def test_another_quantization_is_refused_with_its_reason(config, said):
    with pytest.raises(UsageError) as caught:
        Fp8Format.of({"quantization_config": config})
    (sentence,) = caught.value.messages
    assert said in sentence and "quantization_config of the HF config" in sentence


def layer_bucket() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"mlp.gate_proj": (8, 6), "mlp.up_proj": (8, 6), "mlp.down_proj": (6, 8), "self_attn.k_proj": (5, 6)}
    bucket = [(f"model.layers.0.{n}.weight", torch.randn(s, generator=generator)) for n, s in shapes.items()]
    return [
        ("model.embed_tokens.weight", torch.ones(4, 6)),
        *bucket,
        ("model.layers.0.mlp.gate.weight", torch.ones(2)),
    ]


@pytest.mark.parametrize("block", [(4, 4), None])
def test_a_bucket_is_quantized_together_as_its_tensors_are_by_themselves(block):
    fmt, bucket = Fp8Format(block_size=block), layer_bucket()
    found = quantize_bucket(bucket, fmt)
    by_name = dict(found)
    assert [name for name, _ in found if not name.endswith("_scale_inv" if block else "_scale")] == [
        name for name, _ in bucket
    ]
    assert stored_bytes(bucket, fmt) == sum(tensor.nbytes for _, tensor in found)
    for name, weight in bucket:
        if not fmt.quantizes(name):
            assert by_name[name] is weight
        elif block:
            values, scales = quantize_blocks(weight, block)
            assert torch.equal(by_name[name].float(), values.float())
            assert torch.equal(by_name[name + "_scale_inv"], scales)
    if block is None:
        weights = dict(bucket)
        gate, up, down = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        shared = max(weights[gate].abs().max(), weights[up].abs().max()) / 448
        assert by_name[gate + "_scale"] == by_name[up + "_scale"] == shared
        assert by_name[down + "_scale"] == weights[down].abs().max() / 448


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("block", [(4, 4), None])
def test_a_weight_that_is_not_finite_is_named(bad, block):
    bucket = layer_bucket()
    bucket[3][1][5, 2] = bad
    with pytest.raises(QuantizationError, match=r"down_proj.weight has a weight that is infinite or no number"):
        quantize_bucket(bucket, Fp8Format(block_size=block))
    bucket[3][1][5, 2] = 1.0
    bucket[0][1][0, 0] = bad  # not quantised: other checks look at it
    quantize_bucket(bucket, Fp8Format(block_size=block))


def test_one_parameter_is_converted_with_its_scales(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen3")
    name = "module.decoder.layers.1.mlp.linear_fc1.weight"
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    found = convert_to_hf(make_args(tmp_path / "hf"), "qwen3", name, torch.ones(96, 32), config)
    assert [(n, tuple(t.shape)) for n, t in found] == [
        ("model.layers.1.mlp.gate_proj.weight", (48, 32)),
        ("model.layers.1.mlp.gate_proj.weight_scale_inv", (3, 2)),
        ("model.layers.1.mlp.up_proj.weight", (48, 32)),
        ("model.layers.1.mlp.up_proj.weight_scale_inv", (3, 2)),
    ]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def sync_and_export(args, out, buffer_size):
    """A trainer starts from the fp8 checkpoint; what it would sync is that checkpoint, and what it exports, too."""
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.weights.names import expected_hf_names

    model = [get_model_provider_func(args)()]
    load_hf_weights(args, model, args.hf_checkpoint)
    buckets = list(iter_hf_buckets(args, model, buffer_size=buffer_size))
    assert len(buckets) > 2
    assert all(sum(tensor.nbytes for _, tensor in bucket) <= buffer_size for bucket in buckets)
    sent = dict(pair for bucket in buckets for pair in bucket)
    stored = tensors_of(Path(args.hf_checkpoint))
    assert sent.keys() == stored.keys() == expected_hf_names(Path(args.hf_checkpoint))
    for name, tensor in stored.items():
        assert (sent[name].dtype == E4M3) == (tensor.dtype == E4M3), name
        if "_scale" in name:  # the largest value of a block times its scale, over 448: two roundings
            torch.testing.assert_close(sent[name], tensor, rtol=2**-22, atol=0)
        else:
            assert torch.equal(sent[name].float(), tensor.float()), name
    save_hf(args, model, out)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "flags", "strategy"),
    [
        ("qwen3", "", ("--block-size", "16")),
        ("qwen3", "--tensor-model-parallel-size 2", ("--strategy", "tensor")),
        ("qwen3_moe", "--expert-model-parallel-size 2", ("--block-size", "16", "8")),
        ("minimax_m2", "", ("--strategy", "tensor")),
    ],
)
def test_a_trainer_starts_from_an_fp8_checkpoint_and_syncs_the_same_bytes(tmp_path, family, flags, strategy):
    make_hf_model(tmp_path / "hf", family, dtype="bfloat16")
    fp8 = tmp_path / "fp8"
    command = ["--model-dir", str(tmp_path / "hf"), "--save-dir", str(fp8), "--shard-bytes", "20000", *strategy]
    assert convert_hf_to_fp8.main(command) == 0
    assert len(list(fp8.glob("*.safetensors"))) > 1
    plain, stored, fmt = tensors_of(tmp_path / "hf"), tensors_of(fp8), format_of_checkpoint(fp8)
    assert fmt is not None
    for name, weight in plain.items():
        if not fmt.quantizes(name):
            assert torch.equal(stored[name], weight), name
            continue
        scales = stored[name + fmt.scale_suffix]
        step = scales.max() * 448 / 16  # half a step of the largest values
        assert (dequantize(stored[name], scales, fmt.block_size) - weight.float()).abs().max() <= step * 1.001
    args = make_args(fp8, flags, update_weight_buffer_size=20_000)
    run_world(args.actor_num_gpus_per_node, sync_and_export, args, tmp_path / "out", 20_000)
    exported = tensors_of(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in exported.items()} == {n: t.dtype for n, t in stored.items()}
    assert format_of_checkpoint(tmp_path / "out") == fmt


@pytest.mark.processes
def test_fp8_goes_through_a_torch_dist_checkpoint_and_back_to_bf16(tmp_path):
    make_hf_model(tmp_path / "hf", dtype="bfloat16")
    fp8, bf16 = tmp_path / "fp8", tmp_path / "bf16"
    assert convert_hf_to_fp8.main(["--model-dir", str(tmp_path / "hf"), "--save-dir", str(fp8)]) == 0
    assert fp8_cast_bf16.main(["--input-fp8-hf-path", str(fp8), "--output-bf16-hf-path", str(bf16)]) == 0
    assert "quantization_config" not in json.loads((bf16 / "config.json").read_text())
    stored, plain = tensors_of(fp8), tensors_of(bf16)
    assert plain.keys() == tensors_of(tmp_path / "hf").keys()
    for name, weight in plain.items():
        scales = stored.get(name + "_scale_inv")
        expected = stored[name] if scales is None else dequantize(stored[name], scales, (128, 128), torch.bfloat16)
        assert torch.equal(weight, expected), name

    from tests.unit.test_hf_weights import run_tool

    shape = "--model-args-from-hf"
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", str(fp8), "--save", str(tmp_path / "dist"), shape)
    back = tmp_path / "back"
    origin = ["--input-dir", str(tmp_path / "dist"), "--origin-hf-dir", str(fp8), "--output-dir", str(back)]
    assert convert_torch_dist_to_hf.main(origin) == 0
    assert {n: t.dtype for n, t in tensors_of(back).items()} == {n: t.dtype for n, t in stored.items()}


def test_what_cannot_be_converted_is_said(tmp_path, capsys):
    make_hf_model(tmp_path / "hf")
    hf, out = str(tmp_path / "hf"), str(tmp_path / "out")
    base = ["--model-dir", hf, "--save-dir"]
    for command, said in (
        ([*base, hf], "is --model-dir"),
        ([*base, out, "--strategy", "channel"], "compressed-tensors"),
        ([*base, out, "--strategy", "tensor", "--block-size", "8"], "no effect"),
        ([*base, out, "--block-size", "8", "8", "8"], "one or two numbers"),
        ([*base, out, "--max-workers", "0"], "--max-workers 0"),
        (["--model-dir", out, "--save-dir", out], "no config.json"),
    ):
        assert convert_hf_to_fp8.main(command) == 2
        assert said in capsys.readouterr().err
    assert fp8_cast_bf16.main(["--input-fp8-hf-path", hf, "--output-bf16-hf-path", out]) == 2
    assert "nothing to convert" in capsys.readouterr().err
    assert not Path(out).exists()
