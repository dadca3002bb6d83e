"""Megatron's flags: where they come from, what they derive, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch

from slime.backends.megatron_utils import arguments
from slime.backends.megatron_utils.arguments import (
    add_megatron_arguments,
    derive_megatron,
    megatron_problems,
    model_args_from_hf,
    model_shape,
)
from slime.utils.checkpoint_paths import MODEL_SHAPE_FILE, TRACKER_FILE
from slime.utils.errors import UsageError
from tests.unit.megatron_fakes import SLIME_DEFAULTS, make_args

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


@pytest.fixture
def hf(tmp_path):
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3))
    return path


def parse(flags: str = "", **values):
    args = add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    vars(args).update(SLIME_DEFAULTS | values)
    return args


def test_an_option_that_the_parser_already_has_keeps_its_default():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--finetune", action="store_true", default=None)
    args = add_megatron_arguments(parser).parse_args([])
    assert (args.lr, args.finetune) == (1e-6, None)
    assert args.clip_grad == 1.0  # Megatron's own default


def test_flags_take_name_type_and_help_from_megatrons_configs():
    parser = add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        [
            "--norm-epsilon",
            "1e-6",
            "--disable-bias-linear",
            "--adam-beta2",
            "0.95",
            "--recompute-granularity",
            "full",
            "--recompute-modules",
            "core_attn",
            "mlp",
            "--accumulate-allreduce-grads-in-fp32",
        ]
    )
    assert args.layernorm_epsilon == 1e-6
    assert args.add_bias_linear is False
    assert args.adam_beta2 == 0.95
    assert args.recompute_modules == ["core_attn", "mlp"]
    assert args.grad_reduce_in_fp32 is True
    assert "Number of transformer layers" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--recompute-granularity", "some"])


def test_the_model_flags_of_a_qwen3_config():
    derived = model_args_from_hf(QWEN3)
    assert derived["kv_channels"] == 16
    assert derived["qk_layernorm"] is True
    assert derived["add_qkv_bias"] is False
    assert derived["rotary_base"] == 1_000_000
    assert derived["untie_embeddings_and_output_weights"] is False
    llama = {**QWEN3, "model_type": "llama", "rope_theta": 5e5, "head_dim": None}
    del llama["rope_parameters"]
    llama["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    derived = model_args_from_hf(llama)
    assert (derived["use_rope_scaling"], derived["rope_scaling_factor"], derived["rotary_base"]) == (
        True,
        32.0,
        500000,
    )
    assert derived["kv_channels"] == 32 // 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_model_that_we_do_not_have_is_refused_by_name(changes, named):
    with pytest.raises(UsageError, match=named):
        model_args_from_hf({**QWEN3, **changes})


def test_flags_from_the_hf_config_have_no_problems(hf):
    args = make_args(hf)
    assert megatron_problems(args, QWEN3) == []
    assert args.padded_vocab_size == 128  # 100 rounded up to a multiple of 128
    assert make_args(hf, "--tensor-model-parallel-size 2").padded_vocab_size == 256
    assert make_args(hf, "--make-vocab-size-divisible-by 1").padded_vocab_size == 100


def test_precision_follows_the_device(hf):
    assert make_args(hf).params_dtype == torch.float32
    assert make_args(hf, accelerator="cuda").params_dtype == torch.bfloat16
    half = make_args(hf, "--fp16", accelerator="cuda")
    assert (half.params_dtype, half.bf16) == (torch.float16, False)
    assert make_args(hf).bf16 is False


def test_derived_values_are_returned_and_not_set(hf):
    args = parse("--weight-decay 0.1 --sequence-parallel", **model_args_from_hf(QWEN3), hf_checkpoint=str(hf))
    before = dict(vars(args))
    derived = derive_megatron(args)
    assert vars(args) == before
    assert (derived["start_weight_decay"], derived["end_weight_decay"]) == (0.1, 0.1)
    assert derived["sequence_parallel"] is False  # nothing to split with TP 1
    assert derived["use_distributed_optimizer"] is True


@pytest.mark.parametrize(
    ("flags", "values", "named"),
    [
        ("--pipeline-model-parallel-size 2", {}, "not supported yet (parallelism)"),
        ("--context-parallel-size 2", {}, "not supported yet (parallelism)"),
        ("--tensor-model-parallel-size 4", {"actor_num_gpus_per_node": 4}, "--num-query-groups 2 does not divide"),
        ("--tensor-model-parallel-size 2", {"actor_num_gpus_per_node": 3}, "3 trainer GPUs or slots"),
        ("--bf16", {}, "computes in fp32"),
        ("--fp16 --bf16", {"accelerator": "cuda"}, "exclude each other"),
        ("--attention-backend flash", {}, "needs CUDA"),
        ("--attention-dropout 0.1", {}, "--attention-dropout"),
        ("--min-lr 1", {}, "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters 3 --lr-warmup-fraction 0.1", {}, "--lr-warmup-fraction and --lr-warmup-iters"),
        ("--recompute-granularity full", {}, "--recompute-method"),
        ("--weight-decay-incr-style linear", {}, "--start-weight-decay"),
    ],
)
def test_what_cannot_work_is_named(hf, flags, values, named):
    args = parse(flags, **({**model_args_from_hf(QWEN3), "hf_checkpoint": str(hf)} | values))
    problems = megatron_problems(args, QWEN3)
    assert len(problems) == 1
    assert named in problems[0]


def test_every_disagreement_with_the_hf_config_is_listed(hf):
    args = make_args(hf)
    args.num_layers, args.rotary_base, args.qk_layernorm = 3, 10000, False
    problems = megatron_problems(args, QWEN3)
    assert [p.split(":")[0] for p in problems] == ["--num-layers", "--rotary-base", "--qk-layernorm"]
    assert "2" in problems[0]
    assert "3" in problems[0]


def test_missing_model_flags_point_to_model_args_from_hf():
    (problem,) = megatron_problems(parse(), None)
    assert "--num-layers" in problem
    assert "--model-args-from-hf" in problem


def test_a_checkpoint_of_another_shape_is_refused_at_parse_time(hf, tmp_path):
    args = make_args(hf)
    root = tmp_path / "ckpt"
    (root / "iter_0000004").mkdir(parents=True)
    (root / TRACKER_FILE).write_text("4")
    shape = model_shape(args)
    (root / "iter_0000004" / MODEL_SHAPE_FILE).write_text(json.dumps(shape))
    args.load = str(root)
    assert megatron_problems(args, QWEN3) == []
    (root / "iter_0000004" / MODEL_SHAPE_FILE).write_text(json.dumps(shape | {"hidden_size": 64}))
    (problem,) = megatron_problems(args, QWEN3)
    assert problem == f"--load {root} holds a model with --hidden-size 64, the flags say 32."
    args.ckpt_step = 9
    (problem,) = megatron_problems(args, QWEN3)
    assert "iter_0000009 does not exist" in problem


def test_a_checkout_that_shadows_megatron_core_is_named(tmp_path, monkeypatch):
    checkout = tmp_path / "Megatron-LM"
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "core" / "__init__.py").write_text("")
    assert arguments.shadowing_problem() is None
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert f"{checkout}/megatron" in (arguments.shadowing_problem() or "")
    with pytest.raises(UsageError, match="shadows"):
        add_megatron_arguments(argparse.ArgumentParser())
