"""tools/convert_lora.py: an adapter and its base become the model that PEFT merges of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.unit.megatron_fakes import make_hf_model
from tools import convert_lora

TARGETS = ("q_proj", "down_proj", "lm_head")


def write_peft_adapter(base: Path, path: Path, targets: Sequence[str] = TARGETS[:2], **config: object) -> None:
    """A random adapter, written by PEFT."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=6, target_modules=[*targets], init_lora_weights=False, **config),
    )
    model.save_pretrained(path)


def merge(base: Path, adapter: Path, output: Path) -> int:
    return convert_lora.main(["--base", str(base), "--adapter", str(adapter), "--output", str(output)])


@pytest.mark.parametrize(("use_rslora", "tied"), [(False, False), (True, False), (False, True)])
def test_the_merged_model_is_what_peft_merges(tmp_path: Path, use_rslora: bool, tied: bool) -> None:
    """An output layer that was the embedding becomes a matrix of its own."""
    from peft import PeftModel

    torch.manual_seed(0)
    make_hf_model(tmp_path / "base", tied=tied)
    write_peft_adapter(tmp_path / "base", tmp_path / "adapter", TARGETS, use_rslora=use_rslora)
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted, tokens = PeftModel.from_pretrained(base, tmp_path / "adapter"), torch.arange(9)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=1e-5, rtol=1e-5)
    expected, found = adapted.merge_and_unload().state_dict(), merged.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tied and name == "model.embed_tokens.weight":
            continue  # PEFT changes it, too, and its merged model answers otherwise than its adapter
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    moved = {name.split(".")[-2] for name in found if not torch.equal(found[name], untouched[name])}
    assert moved == set(TARGETS)


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hf_model(tmp_path / "base")
    make_hf_model(tmp_path / "other", hidden_size=64)
    write_peft_adapter(tmp_path / "base", tmp_path / "adapter")
    assert merge(tmp_path / "other", tmp_path / "adapter", tmp_path / "out") == 2
    assert "give the base that the adapter was trained over" in capsys.readouterr().err
    assert merge(tmp_path / "base", tmp_path / "base", tmp_path / "out") == 2
    assert "is no PEFT directory that can be read" in capsys.readouterr().err

    config = tmp_path / "adapter" / "adapter_config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"use_dora": True}))
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 2
    assert "use_dora True of its adapter_config.json is not built" in capsys.readouterr().err
    config.write_text(json.dumps(given | {"init_lora_weights": "pissa_niter_4"}))
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 2
    assert "init_lora_weights pissa_niter_4 of its adapter_config.json changes the base" in capsys.readouterr().err
    config.write_text(json.dumps(given))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.magnitude": torch.ones(1)}, file)
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 2
    assert "magnitude in it is no A or B" in capsys.readouterr().err
    save_file({name: tensor for name, tensor in tensors.items() if "lora_B" not in name}, file)
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 2
    assert "and None" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
