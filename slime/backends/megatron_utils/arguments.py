"""Megatron's part of the command line: its flags, their checks, and the values derived from them.

Everything here works on flags and small JSON files, before anything starts. It opens no weights, builds no model,
and knows slime's own flags only by the attributes that it reads (cluster size, accelerator, checkpoint paths).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.config_flags import add_config_flags
from slime.backends.megatron_utils.flag_classes import refused_flags
from slime.backends.megatron_utils.hf_config import (
    SUPPORTED_MODEL_TYPES,
    config_mismatches,
    flag_of,
    model_args_from_hf,
    unsupported_model,
)
from slime.backends.megatron_utils.megatron_to_hf.rules import family_of
from slime.backends.megatron_utils.parser_flags import add_parser_flags
from slime.utils.checkpoint_paths import MODEL_SHAPE_FILE, classify_checkpoint, resolve_checkpoint_dir
from slime.utils.errors import UsageError

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "add_megatron_arguments",
    "derive_megatron",
    "megatron_problems",
    "model_args_from_hf",
    "model_shape",
    "set_default_megatron_args",
]

REQUIRED_MODEL_FLAGS = ("num_layers", "hidden_size", "num_attention_heads")
SHAPE_KEYS = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "qk_layernorm",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "vocab_size",
]
AT_LEAST: dict[int, tuple[str, ...]] = {
    1: (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "padded_vocab_size",
        "seq_length",
        "max_position_embeddings",
        "lr_decay_iters",
        "recompute_num_layers",
        "bucket_size",
    ),
    0: (
        "kv_channels",
        "lr_warmup_iters",
        "lr_warmup_init",
        "min_lr",
        "weight_decay",
        "start_weight_decay",
        "end_weight_decay",
        "ckpt_step",
        "hidden_dropout",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "init_method_std",
    ),
}


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's flags to `parser`, except options that it already has; returns the parser.

    Raises:
        UsageError: when another Megatron on the path shadows the installed megatron-core.
    """
    if problem := shadowing_problem():
        raise UsageError(problem)
    add_parser_flags(parser)
    add_config_flags(parser)
    return parser


def set_default_megatron_args(args: argparse.Namespace) -> argparse.Namespace:
    """Set the derived Megatron values on `args` and return it (for tools that build a model without the trainer)."""
    for name, value in derive_megatron(args).items():
        setattr(args, name, value)
    return args


def shadowing_problem() -> str | None:
    """Return a sentence when `import megatron.core` would not find the installed megatron-core package, else None."""
    try:
        installed = Path(
            str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core/__init__.py"))
        )
    except importlib.metadata.PackageNotFoundError:
        return "megatron-core is not installed; run scripts/setup_env.sh."
    namespace = importlib.util.find_spec("megatron")
    for location in (namespace.submodule_search_locations or []) if namespace else []:
        found = Path(location) / "core" / "__init__.py"
        if found.is_file() and found.resolve() != installed.resolve():
            return (
                f"{location} (a Megatron-LM checkout?) shadows the installed megatron-core "
                f"{importlib.metadata.version('megatron-core')}; take it off PYTHONPATH and out of this directory."
            )
    return None


def megatron_problems(args: argparse.Namespace, hf_config: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence for everything that is wrong with Megatron's flags; an empty list when they work.

    Args:
        args: parsed flags, before or after `derive_megatron`.
        hf_config: the dict of --hf-checkpoint's config.json, or None where there is none to compare with.
    """
    problems = [problem] if (problem := shadowing_problem()) else []
    problems += refused_flags(args)
    problems += _range_problems(args)
    problems += _family_problems(args.model_name)
    problems += _precision_problems(args)
    problems += _schedule_problems(args)
    if args.custom_model_provider_path:
        return problems  # the hook's model need not be what the model flags describe
    missing = [name for name in REQUIRED_MODEL_FLAGS if not vars(args)[name]]
    if missing:
        flags = ", ".join(flag_of(name) for name in missing)
        return [*problems, f"{flags} not given; give the model's flags (scripts/models/*.sh) or --model-args-from-hf."]
    problems += _model_problems(args) + _parallel_problems(args)
    if hf_config is not None:
        problems += config_mismatches(args, hf_config) + unsupported_model(hf_config)
    for flag, path, step in (("--load", args.load, args.ckpt_step), ("--ref-load", args.ref_load, args.ref_ckpt_step)):
        problems += checkpoint_shape_problems(args, flag, path, step)
    return problems


def _range_problems(args: argparse.Namespace) -> list[str]:
    given = {name: (least, vars(args)[name]) for least, names in AT_LEAST.items() for name in names}
    return [
        f"{flag_of(name)} {value} must be at least {least}."
        for name, (least, value) in given.items()
        if value is not None and value < least
    ]


def _family_problems(model_name: str | None) -> list[str]:
    try:
        if model_name is not None:
            family_of(model_name)
    except UsageError as error:
        return [f"--model-name {model_name}: {message}" for message in error.messages]
    return []


def _precision_problems(args: argparse.Namespace) -> list[str]:
    if args.bf16 and args.fp16:
        return ["--bf16 and --fp16 exclude each other; give one."]
    if args.accelerator == "cpu" and (args.bf16 or args.fp16):
        return [
            f"--{'bf16' if args.bf16 else 'fp16'}: the trainer computes in fp32 on --accelerator cpu; leave it out."
        ]
    if args.accelerator == "cpu" and args.attention_backend == "flash":
        return ["--attention-backend flash needs CUDA; leave it out on --accelerator cpu."]
    return []


def _schedule_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        problems.append("--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one.")
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        problems.append(f"--lr-warmup-fraction {args.lr_warmup_fraction} must lie in [0, 1).")
    if args.min_lr > args.lr:
        problems.append(f"--min-lr {args.min_lr} is above --lr {args.lr}.")
    if args.weight_decay_incr_style != "constant" and None in (args.start_weight_decay, args.end_weight_decay):
        problems.append("--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay.")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        problems.append("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other.")
    return problems


def _model_problems(args: argparse.Namespace) -> list[str]:
    ours = "the models that are built here need it"
    wrong = {
        f"--normalization {args.normalization}: give --normalization RMSNorm, {ours}.": args.normalization
        != "RMSNorm",
        f"--swiglu is not given; {ours}.": not args.swiglu,
        f"--disable-bias-linear is not given; {ours}.": args.add_bias_linear,
        f"--attention-dropout {args.attention_dropout}: our attention has no dropout; use 0.": bool(
            args.attention_dropout
        ),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers.": (
            args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers)
        ),
    }
    return [sentence for sentence, is_wrong in wrong.items() if is_wrong]


def _parallel_problems(args: argparse.Namespace) -> list[str]:
    tp, world = args.tensor_model_parallel_size, args.actor_num_nodes * args.actor_num_gpus_per_node
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    parts = {
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": groups,
        "--ffn-hidden-size": args.ffn_hidden_size or 4 * args.hidden_size,
        "--padded-vocab-size": args.padded_vocab_size or tp,
    }
    problems = [
        f"{flag} {value} does not divide by --tensor-model-parallel-size {tp}; choose another TP size."
        for flag, value in parts.items()
        if value % tp
    ]
    if world % tp:
        problems.append(
            f"{world} trainer GPUs or slots (--actor-num-nodes x --actor-num-gpus-per-node) do not divide by "
            f"--tensor-model-parallel-size {tp}."
        )
    if groups and args.num_attention_heads % groups:
        problems.append(
            f"--num-attention-heads {args.num_attention_heads} does not divide by --num-query-groups {groups}."
        )
    return problems


def checkpoint_shape_problems(args: argparse.Namespace, flag: str, path: str | None, step: int | None) -> list[str]:
    """Return a sentence for each model flag in which the Megatron checkpoint at `path` differs from `args`."""
    if classify_checkpoint(path) != "megatron":
        return []
    assert path is not None
    try:
        directory, _ = resolve_checkpoint_dir(path, step)
    except UsageError as error:
        return [f"{flag}: {message}" for message in error.messages]
    shape_file = directory / MODEL_SHAPE_FILE
    if not shape_file.is_file():
        return []
    saved, ours = json.loads(shape_file.read_text()), model_shape(args)
    return [
        f"{flag} {path} holds a model with {flag_of(name)} {saved[name]}, the flags say {ours[name]}."
        for name in SHAPE_KEYS
        if name in saved and saved[name] is not None and ours[name] is not None and saved[name] != ours[name]
    ]


def model_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers that a checkpoint's model must share with a run that loads it; saved as model_shape.json."""
    values = vars(args) | _derived_shape(args)
    return {name: values[name] for name in SHAPE_KEYS}


def _derived_shape(args: argparse.Namespace) -> dict[str, Any]:
    heads = args.num_attention_heads
    return {
        "num_query_groups": args.num_query_groups if args.group_query_attention else heads,
        "kv_channels": args.kv_channels or args.hidden_size // heads,
        "ffn_hidden_size": args.ffn_hidden_size or 4 * args.hidden_size,
        "vocab_size": args.vocab_size or _vocab_size_of(args.hf_checkpoint),
    }


def _vocab_size_of(hf_checkpoint: str | None) -> int | None:
    config = Path(hf_checkpoint or "") / "config.json"
    return json.loads(config.read_text()).get("vocab_size") if hf_checkpoint and config.is_file() else None


def derive_megatron(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values that follow from Megatron's flags: {attribute: value}; changes nothing in `args`."""
    on_cpu, tp = args.accelerator == "cpu", args.tensor_model_parallel_size
    bf16 = not on_cpu and not args.fp16
    world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    seq_length = args.seq_length or 4096
    derived: dict[str, Any] = {
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float16 if args.fp16 else torch.float32,
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
        "sequence_parallel": args.sequence_parallel and tp > 1,  # as Megatron: there is nothing to split with TP 1
        "seq_length": seq_length,
        "max_position_embeddings": args.max_position_embeddings or seq_length,
        "start_weight_decay": args.weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        "end_weight_decay": args.weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        "world_size": world_size,
        "data_parallel_size": world_size // tp,
        "rank": 0,
    }
    if args.num_attention_heads and args.hidden_size:
        derived |= _derived_shape(args)
        if derived["vocab_size"] and not args.padded_vocab_size:
            multiple = max(1, args.make_vocab_size_divisible_by) * tp
            derived["padded_vocab_size"] = -(-derived["vocab_size"] // multiple) * multiple
    return derived
