"""Weights travel HF -> Megatron -> HF unchanged, whole or cut over ranks, through files and through buckets."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from itertools import filterfalse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf, remove_padding
from slime.models.families import FAMILIES, family_of, family_of_args
from slime.models.layouts import GateUp, Qkv, TensorShape
from slime.utils.errors import UsageError
from slime.weights.names import is_of_other_part
from tests.unit.megatron_fakes import make_args, make_hf_model, run_forked, run_world
from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

ROOT = Path(__file__).resolve().parents[2]
SHAPE = TensorShape(
    num_layers=2, num_attention_heads=4, num_query_groups=2, kv_channels=3, vocab_size=5, padded_vocab_size=8
)


def run_tool(tool, *argv: str) -> None:
    """Run a tool's main in a forked process (the stand-ins for CUDA would stay in this one); it must return 0."""
    assert run_forked(lambda: tool.main(argv)) == 0


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bytes(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), name


def test_a_group_holds_its_queries_then_its_key_then_its_value():
    # 2 groups of 2 query heads with 3 channels: rows of q are 0..11, of k 100..105, of v 200..205.
    q, k, v = torch.arange(12.0), 100 + torch.arange(6.0), 200 + torch.arange(6.0)
    param = Qkv().to_megatron([q, k, v], SHAPE)
    first_group = [*range(6), 100, 101, 102, 200, 201, 202]
    assert param[:12].tolist() == first_group
    for back, original in zip(Qkv().to_hf(param, SHAPE), (q, k, v), strict=True):
        assert torch.equal(back, original)


def test_each_rank_of_a_gated_mlp_has_matching_rows_of_gate_and_up():
    param = GateUp().to_megatron([torch.arange(4.0), 10 + torch.arange(4.0)], SHAPE)
    parts = GateUp().split(param, 2, 0)
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert torch.equal(GateUp().join(parts, 0), param)


def test_padding_vocabulary_is_zero_when_loaded_and_gone_when_exported():
    rule, (hf_name,) = FAMILIES["llama"].find("module.module.embedding.word_embeddings.weight", num_layers=2)
    assert hf_name == "model.embed_tokens.weight"
    padded = rule.layout.to_megatron([torch.ones(5, 2)], SHAPE)
    assert padded.sum(1).tolist() == [2] * 5 + [0] * 3
    assert rule.layout.to_hf(padded, SHAPE)[0].shape == (5, 2)
    assert remove_padding("module.output_layer.weight", padded, 5).shape == (5, 2)
    assert remove_padding("decoder.final_layernorm.weight", padded, 5) is padded


def test_a_family_is_found_by_its_name_and_a_variant_is_not_taken_for_it():
    assert family_of("Qwen3Config").model_type == "qwen3"
    assert family_of("Qwen2.5-0.5B-Instruct").model_type == "qwen2"
    assert family_of("llama3.2-3B").model_type == "llama"
    for name in ("qwen3_moe", "Qwen3MoeConfig", "Qwen3-30B-A3B"):
        assert family_of(name).model_type == "qwen3_moe"
    assert family_of("glm4_moe").model_type == "glm4_moe"
    assert family_of("GLM-4-9B-0414").model_type == "glm4"
    assert family_of("DeepSeek-V3-0324").model_type == "deepseek_v3"
    for name in ("mimo", "qwen2_moe", "glm4_moe_lite", "kimi_k2"):
        assert family_of(name).model_type == name
    assert family_of("MiMo-7B-RL").model_type == "mimo"
    assert family_of("Qwen2-57B-A14B").model_type == "qwen2_moe"
    for name in ("qwen3_next", "Qwen3-Next-80B-A3B-Instruct"):
        assert family_of(name).model_type == "qwen3_next"
    for name in ("qwen3_5", "Qwen3.5-4B", "Qwen3_5Config"):
        assert family_of(name).model_type == "qwen3_5"
    for name in ("qwen3_5_moe", "Qwen3.5-35B-A3B"):
        assert family_of(name).model_type == "qwen3_5_moe"
    for name in ("qwen3_5_text", "qwen3_5_moe_text", "minimax_m2", "glm_moe_dsa"):
        assert family_of(name).model_type == name
    for name in ("deepseek_v32", "DeepSeek-V3.2", "DeepSeek-V3.2-Exp"):
        assert family_of(name).model_type == "deepseek_v32"
    assert family_of("MiniMax-M2").model_type == "minimax_m2"
    assert family_of("GLM-5").model_type == family_of("GLM-5.2").model_type == "glm_moe_dsa"
    assert family_of("Qwen3-4B").model_type == "qwen3"
    assert family_of("qwen3_vl").model_type == family_of("Qwen3-VL-4B-Instruct").model_type == "qwen3_vl"
    assert family_of("Qwen2.5-VL-3B-Instruct").model_type == family_of("qwen2_5_vl").model_type == "qwen2_5_vl"
    others = (
        "Qwen3-VL-30B-A3B-Instruct",
        "qwen3_vl_moe",
        "glm4v",
        "GLM-4.5",
        "llama4",
        "deepseek_v4",
        "mimo_v2",
        "kimi_k25",
    )
    for other in others:
        with pytest.raises(UsageError, match="llama"):
            family_of(other)


def test_a_model_name_says_which_rules_hold_whatever_the_checkpoint_is_called(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert family_of_args(Namespace(model_name=None, hf_checkpoint=tmp_path)).model_type == "qwen3"
    assert family_of_args(Namespace(model_name="qwen2", hf_checkpoint=tmp_path)).model_type == "qwen2"


def test_a_parameter_that_no_rule_names_is_an_error(tmp_path):
    make_hf_model(tmp_path / "hf", "llama")
    args = make_args(tmp_path / "hf")
    with pytest.raises(KeyError, match="q_layernorm"):
        convert_to_hf(args, "llama", "module.decoder.layers.0.self_attention.q_layernorm.weight", torch.ones(16))
    ((name, _),) = convert_to_hf(args, "llama", "module.decoder.layers.11.mlp.linear_fc2.weight", torch.ones(2, 2))
    assert name == "model.layers.11.mlp.down_proj.weight"


def walk_twice(args):
    from slime.backends.megatron_utils.model.model_weights import iter_weights, named_tensors
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    first = list(iter_weights(model))
    assert [weight.tensor.data_ptr() for weight in first] == [t.data_ptr() for _, t in named_tensors(model)]
    norm = model.decoder.final_layernorm
    norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, 3.0))
    model.embedding.word_embeddings.weight.data = torch.full_like(model.embedding.word_embeddings.weight, 4.0)
    model.named_parameters = None  # the places are known
    second = {weight.name: weight for weight in iter_weights(model)}
    assert list(second) == [weight.name for weight in first]
    assert bool((second["decoder.final_layernorm.weight"].tensor == 3).all())
    assert bool((second["embedding.word_embeddings.weight"].tensor == 4).all())
    assert not any(weight.tensor.requires_grad for weight in second.values())


@pytest.mark.processes
def test_a_model_is_walked_over_once_and_its_tensors_are_read_each_time(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen3_moe")
    run_world(1, walk_twice, make_args(tmp_path / "hf"))


def export(args, out, buffer_size):
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_stage
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    model = [build_stage(args)]
    load_hf_weights(args, model, args.hf_checkpoint)
    buckets = list(iter_hf_buckets(args, model, buffer_size=buffer_size))
    assert len(buckets) > 2
    assert all(sum(tensor.nbytes for _, tensor in bucket) <= buffer_size for bucket in buckets)
    original = tensors_of(Path(args.hf_checkpoint))
    trained = {name: tensor for name, tensor in original.items() if not is_of_other_part(name)}
    assert_same_bytes(dict(pair for bucket in buckets for pair in bucket), trained)
    with pytest.raises(UsageError, match="overwrite"):
        save_hf(args, model, args.hf_checkpoint)
    save_hf(args, model, out)


TIED = ("llama", "qwen3", "qwen3_5", "qwen3_5_text")
"""Families whose last pipeline stage has a copy of the embedding here; the others' output layer is their own."""


def spread(family: str) -> str:
    """Every axis over which weights are cut: two ranks each."""
    experts = " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1" if FAMILIES[family].has_experts else ""
    return f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2{experts}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "tied", "flags"),
    [
        ("qwen3", True, ""),
        ("qwen3", True, "--tensor-model-parallel-size 2"),
        ("qwen2", False, ""),
        ("qwen3_moe", False, "--expert-tensor-parallel-size 2"),
        *((family, family in TIED, spread(family)) for family in FAMILIES),
    ],
)
def test_an_exported_model_is_the_loaded_one(tmp_path, family, tied, flags):
    make_hf_model(tmp_path / "hf", family, tied=tied)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    args = make_args(tmp_path / "hf", flags, update_weight_buffer_size=30_000)
    run_world(args.actor_num_gpus_per_node, export, args, tmp_path / "out", 30_000)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names >= {"tokenizer.json", "config.json"}


def change_each_parameter(args):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.model_weights import iter_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    def exported() -> dict[str, torch.Tensor]:
        return {name: t.clone() for bucket in iter_hf_buckets(args, model, buffer_size=10**9) for name, t in bucket}

    model, family, changed = [get_model_provider_func(args)()], family_of_args(args), []
    load_hf_weights(args, model, args.hf_checkpoint)
    before = exported()
    for weight in iter_weights(model[0]):
        kept = weight.tensor.clone()
        weight.tensor.add_(1)
        after = exported()
        weight.tensor.copy_(kept)
        names = [name for name in before if not torch.equal(before[name], after[name])]
        assert sorted(names) == sorted(family.find(weight.name, args.num_layers)[1]), weight.name
        assert all(bool((before[name] != after[name]).all()) for name in names), weight.name
        changed += names
    assert sorted(changed) == sorted(filterfalse(is_of_other_part, tensors_of(Path(args.hf_checkpoint))))


@pytest.mark.processes
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_parameter_is_in_tensors_of_its_own_and_all_tensors_are_used(tmp_path, family):
    make_hf_model(tmp_path / "hf", family)
    run_world(1, change_each_parameter, make_args(tmp_path / "hf"))


def refuse_to_load(args, path, said):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import build_model

    with pytest.raises(UsageError, match=said):
        load_hf_weights(args, [build_model(args, None)], path)


@pytest.mark.processes
def test_loading_a_model_of_another_shape_names_the_tensor(tmp_path):
    make_hf_model(tmp_path / "hf")
    make_hf_model(tmp_path / "wide", intermediate_size=64)
    tensors = tensors_of(tmp_path / "hf")
    wide = {n: t for n, t in tensors_of(tmp_path / "wide").items() if "down_proj" in n}
    save_file(tensors | wide, tmp_path / "wide" / "model.safetensors")
    run_world(1, refuse_to_load, make_args(tmp_path / "hf"), tmp_path / "wide", "down_proj")


@pytest.mark.processes
@pytest.mark.parametrize("flags", ["", "--pipeline-model-parallel-size 2"])
def test_tensors_that_no_rank_has_a_place_for_are_named_when_a_model_is_loaded(tmp_path, flags):
    """Also in a run without engines, whose first weight sync would tell: fine-tuning, a reference, a teacher."""
    make_hf_model(tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "more")
    more = {f"model.layers.{i}.mlp.extra.weight": torch.zeros(2) for i in range(2)}
    save_file(tensors_of(tmp_path / "hf") | more, tmp_path / "more" / "model.safetensors")
    args = make_args(tmp_path / "hf", flags)
    said = r"2 tensor\(s\) have no place in the model that the flags describe: model.layers.0.mlp.extra.weight, model"
    run_world(args.pipeline_model_parallel_size, refuse_to_load, args, tmp_path / "more", said)


@pytest.mark.processes
def test_hf_to_torch_dist_to_hf_is_byte_equal_and_does_not_read_the_origins_tensors(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen2", dtype="bfloat16")
    original = tensors_of(tmp_path / "hf")
    original["model.norm.weight"] = original["model.norm.weight"].float() + 1e-5  # not a bfloat16 number
    save_file(original, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist")
    (tmp_path / "hf" / "model.safetensors").unlink()
    back = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf", "--chunk-size", "20000"]
    run_tool(convert_torch_dist_to_hf, *back, "--output-dir", f"{tmp_path}/back")
    assert_same_bytes(tensors_of(tmp_path / "back"), original)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert len(set(index["weight_map"].values())) > 2
    assert convert_torch_dist_to_hf.main([*back, "--output-dir", f"{tmp_path}/back"]) == 2  # exists, no --force


def convert_with_one_parameter_changed(args, name, root):
    from slime.backends.megatron_utils.checkpoint.iterations import CheckpointSource, begin_checkpoint, load_checkpoint
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = [get_model_provider_func(args)()]
    load_checkpoint(CheckpointSource(str(root)), model=model)
    with torch.no_grad():
        dict(model[0].named_parameters())[name].add_(1.0)
    begin_checkpoint(root, 5, model=model).finish()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("megatron_name", "hf_names"),
    [
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            {f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"},
        ),
        ("decoder.layers.0.pre_mlp_layernorm.weight", {"model.layers.0.post_attention_layernorm.weight"}),
    ],
)
def test_a_changed_megatron_parameter_changes_exactly_its_hf_tensors(tmp_path, megatron_name, hf_names):
    make_hf_model(tmp_path / "hf", tied=True)
    original = tensors_of(tmp_path / "hf")
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist")
    run_world(1, convert_with_one_parameter_changed, make_args(tmp_path / "hf"), megatron_name, tmp_path / "dist")
    back = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf"]
    run_tool(convert_torch_dist_to_hf, *back, "--output-dir", f"{tmp_path}/back")
    converted = tensors_of(tmp_path / "back")
    assert converted.keys() == original.keys()
    assert {name for name in original if not torch.equal(original[name], converted[name])} == hf_names


@pytest.mark.processes
def test_conversion_under_torchrun_with_megatrons_flags_gives_the_same_checkpoint(tmp_path):
    make_hf_model(tmp_path / "hf", "llama")
    flags = (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear "
        "--untie-embeddings-and-output-weights"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tools/convert_hf_to_torch_dist.py", "--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist"]
    done = subprocess.run([*command, *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    back = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf"]
    run_tool(convert_torch_dist_to_hf, *back, "--output-dir", f"{tmp_path}/back")
    assert_same_bytes(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


def test_flags_that_disagree_with_the_hf_config_are_all_named(tmp_path, capsys):
    make_hf_model(tmp_path / "hf", "llama")
    flags = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm"
    argv = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist", *flags.split()]
    assert convert_hf_to_torch_dist.main(argv) == 2
    said = capsys.readouterr().err
    for flag in (
        "--num-layers",
        "--num-query-groups",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
    ):
        assert flag in said
    assert "--hidden-size" not in said
    assert not (tmp_path / "dist").exists()
