"""int4 weights: packed as compressed-tensors does, and unpacked again by our own code and tools."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

from slime.conversion.reader import SafetensorsReader
from slime.utils.errors import UsageError
from slime.weights.quantization import dequantize_groups, pack, quantize_groups, unpack
from tests.unit.megatron_fakes import make_hf_model
from tests.unit.test_hf_weights import tensors_of
from tools import (
    convert_hf_to_int4_direct,
    convert_k2_thinking_int4_to_bf16,
)


def test_int4_is_packed_as_compressed_tensors_does_and_comes_back():
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for symmetric in (True, False):
        values, scales, zeros = quantize_groups(weight, 32, symmetric=symmetric)
        assert (values.min() >= -8) and (values.max() <= 7) and scales.shape == (24, 3)
        assert torch.equal(pack(values), pack_to_int32(values, 4))
        assert torch.equal(pack(values, 0), pack_to_int32(values, 4, 0))
        assert torch.equal(unpack(pack(values), 96), values) and torch.equal(unpack(pack(values, 0), 24, 0), values)
        # Half a step, and a whole one where 7.5 steps are cut to 7; of a zero point, half a step more.
        step = scales.float().repeat_interleave(32, 1)
        assert ((dequantize_groups(values, scales, 32, zeros) - weight.float()).abs() <= step * 1.01).all()
    zeros_only = quantize_groups(torch.zeros(2, 32), 32)
    assert zeros_only[0].abs().sum() == 0 and bool((zeros_only[1] > 0).all())


def test_the_example_of_the_docstring_holds():
    values, scales, _ = quantize_groups(torch.tensor([[7.5, -7.5, 1.0, 0.0]]), 4)
    assert values.tolist() == [[7, -8, 1, 0]] and scales.tolist() == [[1.0]]


def test_experts_become_int4_and_bf16_again(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16", moe_intermediate_size=32)
    base = ["--model-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/int4", "--group-size", "16"]
    assert convert_hf_to_int4_direct.main([*base, "--shard-bytes", "30000", "--max-workers", "2"]) == 0
    assert len(list((tmp_path / "int4").glob("*.safetensors"))) > 1
    original, stored = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "int4")
    experts = {name for name in original if ".experts." in name}
    modules = {name.removesuffix("weight_packed") for name in stored if name.endswith("weight_packed")}
    assert {module + "weight" for module in modules} == experts != set()
    config = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["config_groups"]["group_0"]["weights"]["group_size"]) == (
        "compressed-tensors",
        16,
    )
    back = ["--model-dir", f"{tmp_path}/int4", "--output-dir", f"{tmp_path}/bf16"]
    assert convert_k2_thinking_int4_to_bf16.main(back) == 0
    plain = tensors_of(tmp_path / "bf16")
    assert plain.keys() == original.keys()
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    for name, weight in original.items():
        if name not in experts:
            assert torch.equal(plain[name], weight), name
            continue
        values, scales, _ = quantize_groups(weight, 16)
        assert torch.equal(plain[name], dequantize_groups(values, scales, 16, dtype=torch.bfloat16)), name
    for flags, said in (
        (["--group-size", "7"], "not whole groups of --group-size 7"),
        (["--ignore-rules", "re:.*"], "nothing to quantise"),
        (["--ignore-rules", "re:("], r"--ignore-rules re:\( is no regular expression"),
        (["--max-workers", "0"], "--max-workers 0"),
    ):
        with pytest.raises(UsageError, match=said):
            convert_hf_to_int4_direct.convert(
                convert_hf_to_int4_direct.make_parser().parse_args([*base[:3], f"{tmp_path}/x", *flags])
            )


def test_columns_in_another_order_are_refused(tmp_path):
    make_hf_model(tmp_path / "hf", dtype="bfloat16")
    base = ["--model-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/int4", "--group-size", "16"]
    assert convert_hf_to_int4_direct.main(base) == 0
    module = "model.layers.1.mlp.down_proj"
    order = {f"{module}.weight_g_idx": torch.zeros(48, dtype=torch.int32)}
    save_file(tensors_of(tmp_path / "int4") | order, tmp_path / "int4" / "model.safetensors")
    reader = SafetensorsReader(tmp_path / "int4")
    for read in (reader.infos, lambda: reader.get(f"{module}.weight")):
        with pytest.raises(UsageError, match="weight_g_idx says which group each column is of"):
            read()


def test_zero_points_are_kept(tmp_path):
    make_hf_model(tmp_path / "hf", dtype="bfloat16")
    base = ["--model-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/int4", "--group-size", "16"]
    assert convert_hf_to_int4_direct.main([*base, "--no-is-symmetric"]) == 0
    back = ["--model-dir", f"{tmp_path}/int4", "--output-dir", f"{tmp_path}/bf16"]
    assert convert_k2_thinking_int4_to_bf16.main(back) == 0
    name = "model.layers.1.mlp.down_proj.weight"
    weight = tensors_of(tmp_path / "hf")[name]
    values, scales, zeros = quantize_groups(weight, 16, symmetric=False)
    assert torch.equal(
        tensors_of(tmp_path / "bf16")[name], dequantize_groups(values, scales, 16, zeros, torch.bfloat16)
    )
