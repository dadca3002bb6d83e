"""GPTQ: plain rounding where inputs say nothing, less error where they do, and models go through it layer by layer."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.conversion.reader import SafetensorsReader
from slime.utils.errors import UsageError
from slime.weights.formats import Int4Format
from slime.weights.quantization import dequantize_groups, quantize_groups
from tests.unit.megatron_fakes import make_hf_model
from tools import convert_hf_to_int4, convert_k2_thinking_int4_to_bf16
from tools.make_tiny_model import build_tokenizer
from tools.parts import int4_calibration as gptq
from tools.parts.int4_calibration import CalibratedLayers

NOTHING = Int4Format(ignored=("re:.*",))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_uncorrelated_inputs_give_plain_rounding():
    weight = random(6, 32, seed=0)
    expected, scales, _ = quantize_groups(weight, 8)
    # H = c I: the inverse is diagonal, so that no column has anything to make up for. Nor is there where H is unknown.
    for moments in (3.0 * torch.eye(32), torch.zeros(32, 32)):
        found = gptq.quantize(weight, moments, 8)
        assert torch.equal(found[0], expected) and torch.equal(found[1], scales)


def test_correlated_inputs_lose_less_than_by_rounding():
    weight, inputs = random(32, 256, seed=1), random(400, 16, seed=2) @ random(16, 256, seed=3)
    inputs += 0.1 * random(400, 256, seed=4)
    rounded = dequantize_groups(*quantize_groups(weight, 32)[:2], 32)
    chosen = dequantize_groups(*gptq.quantize(weight, inputs.T @ inputs, 32), 32)

    def error(other: torch.Tensor) -> float:
        return float((inputs @ (weight - other).T).square().sum())

    assert error(chosen) < 0.5 * error(rounded)


def layers_of(hf: Path, fmt: Int4Format, samples: list[torch.Tensor]) -> CalibratedLayers:
    reader = SafetensorsReader(hf)
    return CalibratedLayers(
        hf,
        fmt,
        flag="--input-dir",
        read=reader.get,
        infos=reader.infos(),
        samples=samples,
        dampening=0.01,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_layers_one_by_one_compute_what_the_model_does(tmp_path, family):
    model = make_hf_model(tmp_path / "hf", family)
    samples = [torch.arange(7), torch.tensor([5, 3, 90])]
    layers = layers_of(tmp_path / "hf", NOTHING, samples)
    assert [layers.quantize(number) for number in range(2)] == [{}, {}]
    for ids, hidden in zip(samples, layers._hidden, strict=True):
        expected = model.model(ids[None], output_hidden_states=True).last_hidden_state
        torch.testing.assert_close(model.model.norm(hidden), expected, atol=1e-5, rtol=1e-5)


def test_experts_see_the_tokens_that_are_sent_to_them(tmp_path):
    model = make_hf_model(tmp_path / "hf", "qwen3_moe")
    ids = torch.arange(40)
    layers = layers_of(tmp_path / "hf", Int4Format(8, True, ("re:.*self_attn.*",)), [ids])
    layer = layers._filled(0)
    moments, _ = layers._watch(layer, "model.layers.0.")
    layers._forward(layer)
    seen: list[tuple[torch.Tensor, ...]] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    model.model(ids[None])
    hidden, chosen, _ = seen[0]
    for expert in range(8):
        rows = hidden[(chosen == expert).any(-1)]
        found = moments[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
        torch.testing.assert_close(found, rows.T @ rows, atol=1e-4, rtol=1e-4)
        assert found is moments[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]


def test_a_model_is_calibrated_on_a_file_of_samples(tmp_path, capsys):
    make_hf_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16", vocab=len(build_tokenizer()))
    build_tokenizer().save_pretrained(tmp_path / "hf")
    rows = [{"text": "12 + 34 = 46"}, {"prompt": "a" * 50}, {"messages": "9 + 9"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = ["--input-dir", f"{tmp_path}/hf", "--data-dir", f"{tmp_path}/data", "--quant-group-size", "8"]
    assert convert_hf_to_int4.main([*base, "--output-dir", f"{tmp_path}/int4"]) == 0
    back = ["--model-dir", f"{tmp_path}/int4", "--output-dir", f"{tmp_path}/bf16"]
    assert convert_k2_thinking_int4_to_bf16.main(back) == 0
    before, after = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_file(tmp_path / "bf16" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if ".experts." not in name:
            assert torch.equal(after[name], weight), name
        else:
            assert 0 < (after[name] - weight).float().norm() < 0.3 * weight.float().norm(), name

    def refused(*flags: str) -> str:
        assert convert_hf_to_int4.main([*base, "--output-dir", f"{tmp_path}/x", *flags]) == 2
        assert not (tmp_path / "x").exists()
        return capsys.readouterr().err

    assert "--dampening-frac 0.0 is not above 0" in refused("--dampening-frac", "0")
    assert "--quant-type W8A16: engines that a trainer feeds" in refused("--quant-type", "W8A16")
    assert "groups of --quant-group-size 7 columns; give another size." in refused("--quant-group-size", "7")
    (tmp_path / "data" / "train.jsonl").write_text('{"answer": 1}')
    assert 'none of "text", "prompt" and "messages"; it has [\'answer\']' in refused()
    (tmp_path / "data" / "train.jsonl").unlink()
    assert "has no sample" in refused()
    assert "no such file" in refused("--data-dir", f"{tmp_path}/none")


def test_samples_are_cut_and_counted(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "7" * 30}) for _ in range(5)))
    args = Namespace(
        input_dir=str(tmp_path),
        data_dir=str(tmp_path / "rows.jsonl"),
        trust_remote_code=False,
        num_calibration_samples=3,
        max_sequence_length=10,
    )
    assert [ids.shape[0] for ids in convert_hf_to_int4.read_samples(args)] == [10, 10, 10]


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    make_hf_model(tmp_path / "hf")
    with pytest.raises(UsageError, match="makes token 100, and the embedding has 100 rows"):
        layers_of(tmp_path / "hf", NOTHING, [torch.tensor([3, 100])])


def test_a_model_that_transformers_does_not_know_is_refused_with_the_other_tool(tmp_path, capsys):
    make_hf_model(tmp_path / "hf", "mimo")
    build_tokenizer().save_pretrained(tmp_path / "hf")
    (tmp_path / "rows.jsonl").write_text('{"text": "1"}')
    command = ["--input-dir", f"{tmp_path}/hf", "--data-dir", f"{tmp_path}/rows.jsonl", "--quant-group-size", "8"]
    assert convert_hf_to_int4.main([*command, "--output-dir", f"{tmp_path}/x"]) == 2
    assert "use tools/convert_hf_to_int4_direct.py" in capsys.readouterr().err
