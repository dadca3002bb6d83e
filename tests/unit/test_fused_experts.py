"""Experts of a layer that are stored as one tensor: the trainer reads them one by one; engines cannot load them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config.sglang.served_models import served_model_problems
from slime.conversion.reader import SafetensorsReader
from slime.utils.errors import UsageError
from slime.weights.names import expected_hf_names
from tests.unit.megatron_fakes import make_hf_model


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_are_the_same_tensors_as_single_ones(family, is_sharded, tmp_path):
    model = make_hf_model(tmp_path / "single", family)
    shards = {"max_shard_size": "20KB"} if is_sharded else {}
    model.save_pretrained(tmp_path / "fused", save_original_format=False, **shards)
    assert (tmp_path / "fused" / "model.safetensors.index.json").is_file() == is_sharded
    expected, reader = load_file(tmp_path / "single" / "model.safetensors"), SafetensorsReader(tmp_path / "fused")
    assert sorted(reader.names()) == sorted(expected)
    assert reader.dtypes() == dict.fromkeys(expected, torch.float32)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in expected.items())
    assert expected_hf_names(tmp_path / "fused") == expected_hf_names(tmp_path / "single") == set(expected)
    with pytest.raises(UsageError, match=r"has no tensor model.layers.1.mlp.experts.8.up_proj.weight"):
        reader.get("model.layers.1.mlp.experts.8.up_proj.weight")


def problems(path: Path, *, is_synced: bool = True, **config: object) -> list[str]:
    return served_model_problems(config, str(path), is_synced=is_synced)


def test_fused_experts_are_served_only_where_a_trainer_sends_them(tmp_path):
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}, tmp_path / "model.safetensors")
    assert problems(tmp_path) == []
    (sentence,) = problems(tmp_path, is_synced=False)
    assert "stores the experts of a layer as one tensor, which SGLang does not load" in sentence
    index = {"weight_map": {"model.layers.0.mlp.experts.0.up_proj.weight": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems(tmp_path, is_synced=False) == []
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert problems(tmp_path, is_synced=False) == []


def test_a_tied_model_with_experts_is_refused_where_sglang_gives_it_another_output_layer(tmp_path):
    for family in ("qwen2_moe", "qwen3_moe", "glm4_moe"):
        (sentence,) = problems(tmp_path, model_type=family, tie_word_embeddings=True)
        assert f"SGLang ignores tie_word_embeddings of {family}" in sentence
    assert problems(tmp_path, model_type="qwen3_moe", tie_word_embeddings=False) == []
    assert problems(tmp_path, model_type="qwen3", tie_word_embeddings=True) == []
    read = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
    assert problems(tmp_path, model_type="deepseek_v3", tie_word_embeddings=True, **read) == []


def test_a_config_without_what_sglang_reads_and_transformers_does_not_write_is_refused(tmp_path):
    (sentence,) = problems(tmp_path, model_type="glm4_moe_lite")
    assert "config.json has no first_k_dense_replace, which SGLang needs for glm4_moe_lite" in sentence
    assert problems(tmp_path, model_type="glm4_moe_lite", first_k_dense_replace=1) == []
    assert problems(tmp_path, model_type="glm4_moe") == []
    frequency, method = problems(tmp_path, model_type="kimi_k2")
    assert "no moe_layer_freq" in frequency and "no topk_method" in method and "'noaux_tc'" in method
