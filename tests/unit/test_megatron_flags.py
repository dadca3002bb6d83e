"""Every Megatron option: known, classified, and doing what its class says."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import typing
from collections import Counter
from pathlib import Path

import pytest

from slime.backends.megatron_utils import model_provider
from slime.backends.megatron_utils.model_provider import config_kwargs
from slime.config import parse as command_line
from slime.config.megatron.arguments import (
    add_megatron_arguments,
    derive_megatron,
    megatron_flag_class,
    megatron_warnings,
)
from slime.config.megatron.config_flags import NO_OPTION, flag_of_field, megatron_configs
from slime.config.megatron.flag_classes import (
    REFUSED_VALUES,
    SAME_AS_DEFAULT,
    groups_by_option,
    refused_flags,
    registered,
)
from slime.config.megatron.megatron_flags import SLIMES, TABLE
from slime.config.megatron.parser_flags import int_pair, layer_pattern
from slime.config.parser import option_name
from tests.unit.megatron_fakes import SLIME_DEFAULTS

SOURCES = Path(model_provider.__file__).parents[2]
# Modules that only declare or judge options: to be named there is no effect.
NO_READERS = {"parser_flags.py", "parser_flags_training.py", "megatron_flags.py", "value_checks.py", "derived.py"}
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 1000"
# Options that have an effect only beside others.
BESIDE = {
    **dict.fromkeys(
        [
            "--q-lora-rank",
            "--kv-lora-rank",
            "--qk-head-dim",
            "--qk-pos-emb-head-dim",
            "--v-head-dim",
            "--rope-type",
            "--rotary-scaling-factor",
            "--original-max-position-embeddings",
            "--beta-fast",
            "--beta-slow",
            "--mscale",
            "--mscale-all-dim",
        ],
        "--multi-latent-attention",
    ),
    "--accumulate-allreduce-grads-in-fp32": "--fp16",
    "--group-query-attention": "--num-query-groups 2",
    "--num-query-groups": "--group-query-attention",
    "--sequence-parallel": "--tensor-model-parallel-size 2",
}


def of_kind(kind):
    return [option for option, group in groups_by_option().items() if group.kind == kind]


def another_value(action) -> list[str]:
    """Command-line values of an option that are not its default, nor say the same."""
    same = (action.default, *SAME_AS_DEFAULT.get(action.option_strings[0], ()))
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(next(choice for choice in action.choices if choice not in same))]
    texts = {int: "7", float: "0.25", layer_pattern: "[1]*4", int_pair: "3,4", None: "x", str: "x"}
    text = texts[action.type]
    return ["9"] if action.type is int and action.default == 7 else [text]


@functools.cache
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser())


def parse(tokens, **values):
    args = parser().parse_args([*MODEL.split(), *tokens])
    vars(args).update(SLIME_DEFAULTS | {"accelerator": "cuda"} | values)
    vars(args).update(derive_megatron(args))
    return args


# --------------------------------------------------------------------------------------------------- the table


def test_every_option_is_classified_once_and_nothing_else_is():
    rows = Counter(option for group in TABLE for option in group.options.split())
    assert [option for option, times in rows.items() if times > 1] == []
    assert set(rows) == set(registered()) - set(SLIMES)


def test_every_warning_and_refusal_has_a_reason():
    for group in TABLE:
        assert group.kind == "used" or group.reason, group.options


def test_options_of_slimes_own_are_not_classified():
    own = {option_name(field) for cls in command_line.FLAG_CLASSES for field in dataclasses.fields(cls)}
    shared = {first for first, action in registered().items() if own & set(action.option_strings)}
    assert shared == set(SLIMES)
    assert megatron_flag_class("--lr") is None
    assert megatron_flag_class("--no-such-option") is None


def test_a_class_is_found_under_every_name_of_an_option():
    assert megatron_flag_class("--num-layers") == ("used", "")
    assert megatron_flag_class("--override-opt-param-scheduler") == ("warned", "always so here")
    assert megatron_flag_class("--use-gated-attention") == ("used", "")
    assert megatron_flag_class("--context-parallel-size") == ("used", "")
    assert megatron_flag_class("--use-sharp") == ("used", "")


def test_options_that_set_one_attribute_share_its_class():
    kinds: dict[str, set[str]] = {}
    for option, group in groups_by_option().items():
        kinds.setdefault(registered()[option].dest, set()).add(group.kind)
    assert {dest: found for dest, found in kinds.items() if len(found) > 1} == {}


def test_every_field_of_megatrons_configs_is_an_option_or_says_why_not():
    attributes = {action.dest for action in registered().values()}
    names = set()
    for config in megatron_configs().values():
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            names.add(field.name)
            if field.name in NO_OPTION or field.name in attributes:
                continue
            pytest.fail(f"{config.__name__}.{field.name} is no option: {flag_of_field(field, hints[field.name])}")
    assert set(NO_OPTION) <= names


# --------------------------------------------------------------------------------------- what the classes promise


class Recorded(megatron_configs()["model"]):
    """Megatron's model config without its checks: it only keeps what it is given."""

    def __post_init__(self):
        pass


class RecordedLatent(megatron_configs()["mla"]):
    """The same of latent attention."""

    def __post_init__(self):
        pass


def built(args) -> dict:
    """Everything that `args` puts into Megatron's configs."""
    configs = megatron_configs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_provider, "TransformerConfig", Recorded)
        patch.setattr(model_provider, "MLATransformerConfig", RecordedLatent)
        model = vars(model_provider.transformer_config(args))
    return {
        "model": model,
        "optimizer": config_kwargs(configs["optimizer"], args),
        "ddp": config_kwargs(configs["ddp"], args),
    }


@pytest.fixture(scope="module")
def sources() -> str:
    files = [path for path in SOURCES.rglob("*.py") if path.name not in NO_READERS]
    return "\n".join(path.read_text() for path in files)


HAVE_NO_READER = {
    "--bf16": "the default on GPUs; it excludes --fp16",
    **dict.fromkeys(
        ("--moe-enable-deepep", "--moe-token-dispatcher-type"),
        "they need DeepEP and several ranks (test_megatron_derived.py)",
    ),
    "--use-rotary-position-embeddings": "a name of the default",
    **{
        option: "its other values are refused"
        for option, values in REFUSED_VALUES.items()
        if set(registered()[option].choices) - {registered()[option].default} <= set(values)
    },
}


@pytest.mark.parametrize("option", [option for option in of_kind("used") if option not in HAVE_NO_READER])
def test_a_used_option_changes_a_config_or_is_read(option, sources):
    action = registered()[option]
    beside = BESIDE.get(option, "").split()
    base, changed = parse(beside), parse([option, *another_value(action), *beside])
    different = [name for name in vars(changed) if vars(changed)[name] != vars(base)[name]]
    reads = [name for name in different if re.search(rf"\bargs\.{name}\b|a\.{name}\b", sources)]
    assert reads or built(base) != built(changed)


def test_the_options_without_a_reader_are_few():
    refused_otherwise = ["--ckpt-format", "--position-embedding-type"]
    of_deepep = ["--moe-enable-deepep", "--moe-token-dispatcher-type"]
    named = ["--bf16", *refused_otherwise, *of_deepep, "--use-rotary-position-embeddings"]
    assert sorted(HAVE_NO_READER) == sorted(named)


def test_a_warned_option_changes_no_config():
    base = built(parse([]))
    for option in of_kind("warned"):
        changed = built(parse([option, *another_value(registered()[option])]))
        assert changed == base, option


@pytest.mark.parametrize("option", of_kind("refused"))
def test_another_value_of_a_refused_option_is_named(option):
    action = registered()[option]
    tokens = another_value(action)
    args = parse([option, *tokens])
    if vars(args)[action.dest] in SAME_AS_DEFAULT.get(option, ()):
        pytest.fail(f"{option}: choose another value for the test")
    sentences = refused_flags(args)
    assert any(re.search(rf"{option}\b", sentence) for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in SAME_AS_DEFAULT.items() for value in values]
)
def test_values_that_say_the_default_are_accepted(option, value):
    args = parser().parse_args([option, str(value)])
    assert refused_flags(args) == []


def test_nothing_is_refused_without_options():
    assert refused_flags(parser().parse_args([])) == []
    derived = parse([])
    assert refused_flags(derived, derive_megatron(derived)) == []


def test_one_warning_names_all_options_without_effect():
    tokens = ["--no-rope-fusion", "--train-iters", "5", "--num-layers", "2"]
    explicit = {registered()[token].dest for token in tokens if token in registered()}
    (sentence,) = megatron_warnings(parse(tokens), explicit)
    assert sentence.startswith("accepted, without effect: ")
    assert "--no-rope-fusion (it belongs to kernels of TransformerEngine" in sentence
    assert "--train-iters (--num-rollout, --num-epoch" in sentence
    assert "--num-layers" not in sentence
    assert megatron_warnings(parse([]), set()) == []


@pytest.mark.parametrize(
    "text",
    [
        "--attention-softmax-in-fp32 --use-distributed-optimizer --dist-ckpt-format torch_dist",
        "--max-position-embeddings 40960",
        "--eval-iters 100 --log-interval 100",  # their defaults
    ],
)
def test_no_warning_names_what_is_so_anyway(text):
    tokens = text.split()
    args = parse(tokens)
    assert megatron_warnings(args, {registered()[token].dest for token in tokens if token in registered()}) == []
    assert refused_flags(args, derive_megatron(args)) == []


def test_another_format_of_checkpoints_is_refused_under_its_older_name_too():
    (refusal,) = refused_flags(parse(["--dist-ckpt-format", "zarr"]))
    assert refusal.startswith("--dist-ckpt-format zarr is not supported: slime's checkpoints are torch_dist")


def test_refusals_of_one_kind_are_one_sentence():
    flags = "--moe-expert-capacity-factor 1 --moe-token-dropping --data-path a b"
    args = parse(flags.split())
    derived = derive_megatron(args).keys()
    assert refused_flags(args, derived) == [
        "--data-path ['a', 'b'] is not supported: data come from --prompt-data; leave it out.",
        "--moe-token-dropping, --moe-expert-capacity-factor 1.0 are not supported: a token's experts would depend on "
        "chance or on other tokens, and the policy would not be the engine's; leave them out.",
    ]


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("[1,0,1]", [1, 0, 1]),
        ("([0]*3+[1]*58)", [0] * 3 + [1] * 58),
        ("2*[1] + [0]", [1, 1, 0]),
        ("[1]*(2+1)", None),
    ],
)
def test_a_layer_pattern_is_a_number_or_a_list_of_sums_and_products(text, value):
    if value is None:
        with pytest.raises(argparse.ArgumentTypeError, match="no layer pattern"):
            layer_pattern(text)
    else:
        assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "[]", "x", "[1]*10**9", "[1]*99999999", "9**9**9", "__import__('os')", "[[1]]", "[1]+1", "('a',)"]
    + ["[1.5]", "True", "(" * 500, "[1]*-1", "1+1"],
)
def test_nothing_else_is_evaluated(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no layer pattern"):
        layer_pattern(text)


def test_a_pair_of_integers_is_read():
    assert int_pair("(128, 0)") == int_pair("128,0") == (128, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="no pair"):
        int_pair("128")


# ------------------------------------------------------------------------------------- lines as users paste them

DENSE = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128"""
EXPERTS = """--num-experts 128 --moe-ffn-hidden-size 768 --moe-layer-freq ([0]*3+[1]*33) --moe-router-topk 8
    --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.5 --moe-aux-loss-coeff 0 --moe-grouped-gemm --moe-permute-fusion
    --moe-token-dispatcher-type flex --moe-enable-deepep --moe-token-drop-policy probs
    --moe-shared-expert-intermediate-size 768 --moe-shared-expert-overlap"""
LATENT = """--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --original-max-position-embeddings 4096 --beta-fast 32 --beta-slow 1 --attention-softmax-in-fp32 --rope-type yarn
    --moe-router-num-groups 8 --moe-router-group-topk 4 --no-rope-fusion"""
GATED_DELTA = """--apply-layernorm-1p --qk-layernorm --rotary-percent 0.25 --attention-output-gate
    --moe-shared-expert-gate --experimental-attention-variant gated_delta_net --linear-attention-freq 4
    --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16
    --linear-num-value-heads 32 --spec slime_plugins.models.qwen3_next get_qwen3_next_spec"""
FAMILIES = {
    "GLM4": f"{DENSE} --add-qkv-bias --rotary-percent 0.5 --rotary-interleaved --post-self-attn-layernorm "
    "--post-mlp-layernorm --untie-embeddings-and-output-weights",
    "GLM4.5": f"{DENSE} {EXPERTS} --qk-layernorm --add-qkv-bias --rotary-percent 0.5 "
    "--make-vocab-size-divisible-by 64",
    "GLM-5": f"{DENSE} {EXPERTS} {LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 32 "
    "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --enable-experimental",
    "Qwen2.5": f"{DENSE} --add-qkv-bias",
    "Qwen3": f"{DENSE} --qk-layernorm",
    "Qwen3-MoE": f"{DENSE} {EXPERTS} --qk-layernorm",
    "Qwen3-Next": f"{DENSE} {EXPERTS} {GATED_DELTA}",
    "Qwen3.5": f"{DENSE} {EXPERTS} {GATED_DELTA} --mrope-section 11 11 10 --position-embedding-type mrope",
    "DeepSeek-V3": f"{DENSE} {EXPERTS} {LATENT} --mtp-num-layers 1",
    "Kimi-K2": f"{DENSE} {EXPERTS} {LATENT}",
    "Moonlight": f"{DENSE} {EXPERTS} {LATENT} --max-position-embeddings 8192 --transformer-impl transformer_engine",
    "Llama 3": f"{DENSE} --use-rope-scaling --rope-scaling-factor 8.0 --make-vocab-size-divisible-by 1",
    "MiMo": f"{DENSE} --add-qkv-bias --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1",
    "MiniMax-M2": f"{DENSE} {EXPERTS} --qk-layernorm --rotary-percent 0.5",
}
PERFORMANCE = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
    --decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 10
    --num-virtual-stages-per-pipeline-rank 1 --context-parallel-size 2 --cp-comm-type p2p
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --account-for-embedding-in-pipeline-split --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
    --optimizer adam --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --lr-decay-style WSD
    --lr-wsd-decay-style linear --lr-wsd-decay-iters 10 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer --optimizer-offload-fraction 1.0 --main-grads-dtype fp32
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --use-flash-attn --bf16 --use-mcore-models
    --log-throughput --log-timers-to-tensorboard --tensorboard-dir tb --eval-iters 0 --train-iters 100 --num-workers 2
    --ckpt-format torch_dist --dist-ckpt-strictness log_all --use-dist-ckpt --auto-detect-ckpt-format
    --use-persistent-ckpt-worker --ckpt-assume-constant-structure --ckpt-fully-parallel-load --no-load-optim
    --no-load-rng --finetune --no-initialization --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather
    --no-check-for-nan-in-loss-and-grad"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_flags_of_a_model_script_are_all_known(family):
    args, unknown = parser().parse_known_args(FAMILIES[family].split())
    assert unknown == []
    assert args.layernorm_epsilon == 1e-6
    if "--num-experts" in FAMILIES[family]:
        assert args.moe_layer_freq == [0] * 3 + [1] * 33
        assert args.moe_aux_loss_coeff == [0.0]


def test_the_flags_of_a_run_script_are_all_known():
    args, unknown = parser().parse_known_args(PERFORMANCE.split())
    assert unknown == []
    assert args.num_layers_in_first_pipeline_stage == 8
    assert (args.fp8, args.fp8_param_gather) == ("e4m3", True)
    assert args.check_for_nan_in_grad is False
