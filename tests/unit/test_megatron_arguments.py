"""Megatron's flags: where they come from, what they derive, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from slime.checkpoints.paths import MODEL_SHAPE_FILE, TRACKER_FILE
from slime.config.megatron import arguments
from slime.config.megatron.arguments import (
    add_megatron_arguments,
    derive_megatron,
    megatron_problems,
    model_args_from_hf,
    model_shape,
)
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


def problems_of(flags: str = "", hf_config=QWEN3, **values):
    """Problems of a line with all of the HF model's flags, after derivation, as the command line finds them."""
    parser = add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args(flags.split())
    options = parser._option_string_actions
    explicit = {options[token].dest for token in flags.split() if token in options}
    given = SLIME_DEFAULTS | {"accelerator": "cuda"} | model_args_from_hf(QWEN3) | values
    vars(args).update({name: value for name, value in given.items() if name not in explicit})
    vars(args).update(derive_megatron(args))
    return megatron_problems(args, hf_config, explicit)


def test_flags_from_the_hf_config_have_no_problems(hf):
    args = make_args(hf)
    assert megatron_problems(args, QWEN3).all() == []
    assert problems_of().all() == []
    assert args.padded_vocab_size == 128  # 100 rounded up to a multiple of 128
    assert make_args(hf, "--tensor-model-parallel-size 2").padded_vocab_size == 256
    assert make_args(hf, "--make-vocab-size-divisible-by 1").padded_vocab_size == 100


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BY_LAYER = "--cpu-offloading --cpu-offloading-num-layers 1"
BY_MODULE = "--fine-grained-activation-offloading --offload-modules"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--fp16 --bf16", "exclude each other"),
        ("--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "exclude each other"),
        ("--use-flash-attn --attention-backend unfused", "exclude each other"),
        ("--lr-decay-style linear --min-lr 1", "--min-lr 1.0 is above --lr"),
        ("--min-lr 1e-4", "--min-lr has no effect with --lr-decay-style constant"),
        ("--lr-warmup-iters 3 --lr-warmup-fraction 0.1", "--lr-warmup-fraction and --lr-warmup-iters"),
        ("--lr-warmup-init 1e-4", "no effect without a warm-up"),
        ("--lr-decay-iters 5", "no effect with --lr-decay-style constant"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        ("--lr-wsd-decay-iters 5", "without --lr-decay-style WSD"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1 --lr-decay-iters 5",
            "no effect with --lr-decay-style constant",
        ),
        ("--recompute-granularity full", "full needs --recompute-method and --recompute-num-layers."),
        ("--recompute-granularity full --recompute-method uniform", "full needs --recompute-num-layers."),
        ("--recompute-granularity full --recompute-num-layers 1", "full needs --recompute-method."),
        ("--distribute-saved-activations", "--distribute-saved-activations has no effect without --recompute-gran"),
        ("--distribute-checkpointed-activations", "--distribute-saved-activations has no effect without --recom"),
        (f"{FULL} --distribute-saved-activations", "activations has no effect with --tensor-model-parallel-size 1"),
        ("--recompute-method uniform", "without --recompute-granularity full"),
        ("--recompute-activations --recompute-num-layers 1", "without --recompute-granularity full"),
        ("--recompute-granularity selective --recompute-modules core mlp", "--recompute-modules core: choose from"),
        (
            "--recompute-activations --recompute-modules mla_up_proj mlp",
            "mla_up_proj: the model has none; choose from",
        ),
        (
            "--recompute-activations --recompute-modules moe_act",
            "the model has none; choose from core_attn, layernorm",
        ),
        ("--recompute-modules mlp", "without --recompute-granularity selective"),
        (
            "--recompute-activations --recompute-modules layernorm",
            "add --transformer-impl transformer_engine, or leave",
        ),
        (f"{FULL[:-1]}9", "--recompute-num-layers 9 with --recompute-method uniform does not divide the 2 layers"),
        ("--moe-grouped-gemm", "without --num-experts"),
        ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias has no effect without --num-experts"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "have no effect without --num-experts; leave it out"),
        ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff has no effect without --num-experts"),
        ("--multi-latent-attention --rope-type rope", "--multi-latent-attention: the flags say True, the HF config"),
        ("--softmax-scale 0.5", "--softmax-scale: the flags say 0.5, the HF config says None"),
        ("--cpu-offloading", "--cpu-offloading-num-layers 0 with --cpu-offloading must be at least 1"),
        ("--cpu-offloading --cpu-offloading-num-layers 2", "at most 1: the last of a stage's 2 layers goes backward"),
        ("--cpu-offloading-num-layers 1", "has no effect without --cpu-offloading"),
        (f"{BY_LAYER} --recompute-activations", "--cpu-offloading and --recompute-granularity selective exclude"),
        (f"{BY_LAYER} --overlap-grad-reduce", "--cpu-offloading with --overlap-grad-reduce needs --no-gradient-accum"),
        (
            f"{BY_MODULE} qkv_linear --overlap-grad-reduce",
            "with --overlap-grad-reduce needs --no-gradient-accumulation",
        ),
        (f"{BY_LAYER} {BY_MODULE} core_attn", "exclude each other; give one"),
        (f"{BY_LAYER} --min-offloaded-tensor-size 0", "--min-offloaded-tensor-size 0 must be at least 1"),
        ("--min-offloaded-tensor-size 8", "has no effect without --cpu-offloading or"),
        ("--fine-grained-activation-offloading", "needs --offload-modules: choose from attn_norm"),
        ("--offload-modules core_attn", "has no effect without --fine-grained-activation-offloading"),
        (f"{BY_MODULE} mlp core_attn", "--offload-modules mlp: choose from attn_norm"),
        (f"{BY_MODULE} attn_proj", "attn_proj needs core_attn"),
        (f"{BY_MODULE} moe_act", "--offload-modules moe_act: experts are offloaded with their layers"),
        ("--optimizer-offload-fraction 0.5", "has no effect without --optimizer-cpu-offload"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", "must lie in (0, 1]"),
        ("--overlap-cpu-optimizer-d2h-h2d", "has no effect without --optimizer-cpu-offload"),
        ("--no-pin-cpu-grads", "--no-pin-cpu-grads without --optimizer-cpu-offload: nothing is copied"),
        ("--exp-avg-dtype bf16", "has no effect without --use-precision-aware-optimizer"),
        ("--main-grads-dtype bf16", "has no effect without --use-precision-aware-optimizer"),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other",
        ),
        (
            "--weight-decay 0.2 --start-weight-decay 0.1 --end-weight-decay 0.1",
            "--weight-decay 0.2 has no effect with --start-weight-decay 0.1 and --end-weight-decay 0.1",
        ),
        ("--weight-decay-incr-style linear", "--start-weight-decay"),
        ("--start-weight-decay 0.01 --end-weight-decay 0.1", "need --weight-decay-incr-style"),
        ("--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0", "only raises it"),
        ("--use-checkpoint-opt_param-scheduler --override-opt-param-scheduler", "exclude each other"),
        ("--overlap-param-gather", "needs --overlap-grad-reduce"),
        ("--ddp-bucket-size 8", "--ddp-bucket-size has no effect without --overlap-grad-reduce"),
        ("--ddp-num-buckets 8", "--ddp-num-buckets has no effect without --overlap-grad-reduce"),
        ("--ddp-num-buckets 8 --ddp-bucket-size 8 --overlap-grad-reduce", "exclude each other; give one"),
        ("--ddp-average-in-collective --calculate-per-token-loss", "leave --ddp-average-in-collective out"),
        ("--ddp-average-in-collective --ddp-reduce-scatter-with-fp32-accumulation", "which sums; leave one out"),
        ("--hysteresis 3", "no effect but with --fp16"),
        ("--decoupled-min-lr 0.1", "without --decoupled-lr"),
        ("--rope-scaling-factor 4", "without --use-rope-scaling"),
        ("--padded-vocab-size 128 --make-vocab-size-divisible-by 64", "leave one out"),
        ("--padded-vocab-size 64", "below the vocabulary of 100"),
        ("--adam-beta1 2", "--adam-beta1 2.0 must be at most 1"),
        ("--weight-decay -1", "--weight-decay -1.0 must be at least 0"),
        ("--ddp-bucket-size 0 --overlap-grad-reduce", "--ddp-bucket-size 0 must be at least 1"),
        ("--ddp-num-buckets 0 --overlap-grad-reduce", "--ddp-num-buckets 0 must be at least 1"),
        ("--adam-eps nan", "--adam-eps nan must be a finite number"),
        ("--num-layers 99999999999", "must be at most 10000"),
    ],
)
def test_flags_that_contradict_each_other_are_wrong(flags, named):
    problems = problems_of(flags)
    assert len(problems.all()) == 1, problems
    assert named in problems.wrong[0]


@pytest.mark.parametrize(
    "flags",
    [
        f"{BY_LAYER} --overlap-grad-reduce --no-gradient-accumulation-fusion",
        f"{BY_MODULE} attn_norm core_attn mlp_norm --overlap-grad-reduce",  # nothing of these has a fused gradient
        f"{FULL[:-1]}2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 9",
    ],
)
def test_what_goes_together_is_taken(flags):
    assert problems_of(flags).all() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--bf16", "--bf16: the trainer computes in fp32"),
        ("--fp16", "--fp16: the trainer computes in fp32"),
        ("--attention-backend flash", "--attention-backend flash needs CUDA"),
        ("--use-flash-attn", "--use-flash-attn needs CUDA"),
    ],
)
def test_what_only_a_gpu_can_do_is_a_problem_of_the_device(flags, named):
    problems = problems_of(flags, accelerator="cpu")
    assert problems.all() == problems.environment
    assert named in problems.environment[0]
    assert problems_of(flags).all() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--attention-dropout 0.1", "our attention has no dropout"),
        ("--normalization LayerNorm", "--normalization LayerNorm is not supported: no family of"),
        ("--optimizer sgd", "checkpoints no state but Adam's; use adam"),
        ("--optimizer muon", "use adam, or --train-backend fsdp"),
        ("--exp-avg-dtype fp8 --use-precision-aware-optimizer", "only TransformerEngine scales moments"),
        ("--exp-avg-sq-dtype bf16", "stand still under small updates"),
        ("--main-params-dtype fp16", "they stay in fp32"),
        ("--cpu-offloading-weights", "weights stay on the GPU"),
        ("--fp4-recipe nvfp4 --fp4-format e2m1", "training in 8 and 4 bit needs the kernels of TransformerEngine"),
        ("--batch-invariant-mode", "Megatron's batch-invariant kernels replace those of TransformerEngine"),
        ("--transformer-impl inference_optimized", "slime trains the model; use local"),
    ],
)
def test_what_is_not_built_is_not_called_wrong(flags, named):
    problems = problems_of(flags, hf_config=None)
    assert problems.all() == problems.unsupported
    assert named in problems.unsupported[0]


def test_models_that_are_not_built_are_unsupported():
    bare = {"swiglu": False, "add_bias_linear": True}
    sentences = problems_of(hf_config=None, **bare).unsupported
    assert [("--swiglu" in s, "--disable-bias-linear" in s) for s in sentences] == [(True, False), (False, True)]
    other = {**QWEN3, "model_type": "mamba"}
    assert any("'mamba'" in sentence for sentence in problems_of(hf_config=other).unsupported)


def test_predicting_layers_that_the_model_does_not_have_are_refused(hf):
    (problem,) = megatron_problems(make_args(hf, mtp_num_layers=1), QWEN3).wrong
    assert problem.startswith("--mtp-num-layers 1: the HF config (model_type qwen3) has 0 layers")


def test_every_disagreement_with_the_hf_config_is_listed(hf):
    args = make_args(hf)
    args.num_layers, args.rotary_base, args.qk_layernorm = 3, 10000, False
    problems = megatron_problems(args, QWEN3).wrong
    assert [p.split(":")[0] for p in problems] == ["--num-layers", "--rotary-base", "--qk-layernorm"]
    assert "2" in problems[0]
    assert "3" in problems[0]


def test_missing_model_flags_point_to_model_args_from_hf():
    (problem,) = megatron_problems(parse(), None).wrong
    assert "--num-layers" in problem
    assert "--model-args-from-hf" in problem


def test_a_model_of_a_hook_need_not_be_what_the_flags_describe():
    assert megatron_problems(parse(custom_model_provider_path="m.f"), QWEN3).all() == []


def test_a_checkpoint_of_another_shape_is_refused_at_parse_time(hf, tmp_path):
    args = make_args(hf)
    root = tmp_path / "ckpt"
    (root / "iter_0000004").mkdir(parents=True)
    (root / TRACKER_FILE).write_text("4")
    shape = model_shape(args)
    (root / "iter_0000004" / MODEL_SHAPE_FILE).write_text(json.dumps(shape))
    args.load = str(root)
    assert megatron_problems(args, QWEN3).all() == []
    (root / "iter_0000004" / MODEL_SHAPE_FILE).write_text(json.dumps(shape | {"hidden_size": 64}))
    (problem,) = megatron_problems(args, QWEN3).environment
    assert problem == f"--load {root} holds a model with --hidden-size 64, the flags say 32."
    args.ckpt_step = 9
    (problem,) = megatron_problems(args, QWEN3).environment
    assert "iter_0000009 does not exist" in problem


def test_a_missing_checkpoint_ends_a_run_only_when_asked_to(tmp_path):
    assert problems_of(load=str(tmp_path)).all() == []
    (problem,) = problems_of("--exit-on-missing-checkpoint", load=str(tmp_path)).environment
    assert f"--load {tmp_path} has no Megatron checkpoint" in problem


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
