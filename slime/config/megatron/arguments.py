"""Megatron's part of the command line: its flags, their checks, and the values derived from them.

Everything here works on flags and small JSON files, before anything starts. It opens no weights, builds no model,
and knows slime's own flags only by the attributes that it reads (cluster size, accelerator, checkpoint paths). What
each flag does is in megatron_flags.py, the rules are in value_checks.py and layout_checks.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slime.checkpoints.paths import classify_checkpoint, saved_shape
from slime.config.args import Args
from slime.config.megatron import value_checks
from slime.config.megatron.config_flags import add_config_flags
from slime.config.megatron.derived import derive_megatron, model_sizes, without_deepep
from slime.config.megatron.flag_classes import (
    megatron_flag_class,
    megatron_refusals,
    megatron_warnings,
    option_of,
    refused_flags,
)
from slime.config.megatron.kernel_checks import kernel_problems
from slime.config.megatron.layout_checks import layout_problems
from slime.config.megatron.lora_plan import LoraPlan
from slime.config.megatron.model_checks import ATTENTION, EXPERTS, check_indexer_stages
from slime.config.megatron.parser_flags import add_parser_flags
from slime.config.megatron.training_checks import (
    OFFLOADING,
    check_offloaded_layers,
    check_recomputed_layers,
    check_sharp_library,
    nccl_problems,
)
from slime.config.problems import NoEffect, Problems, Rule, broken
from slime.models.families import family_of
from slime.models.hf_config import (
    SUPPORTED_MODEL_TYPES,
    args_implied_by_hf,
    config_differences,
    config_mismatches,
    model_args_from_hf,
    unsupported_model,
)
from slime.utils.errors import UsageError

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "add_megatron_arguments",
    "args_implied_by_hf",
    "derive_megatron",
    "kernel_problems",
    "megatron_flag_class",
    "megatron_problems",
    "megatron_refusals",
    "megatron_warnings",
    "model_args_from_hf",
    "model_differences",
    "model_shape",
    "set_default_megatron_args",
    "teacher_problems",
    "without_deepep",
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
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
]


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


def set_default_megatron_args(args: Args) -> Args:
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


def megatron_problems(
    args: Args, hf_config: Mapping[str, Any] | None, explicit: Collection[str] | None = None
) -> Problems:
    """Return everything that is wrong with Megatron's flags.

    Args:
        args: parsed flags, before or after `derive_megatron`; --load as it was given.
        hf_config: the dict of --hf-checkpoint's config.json, or None where there is none to compare with.
        explicit: attributes whose flags were given; None means unknown, and then nothing is without effect.
    """
    given, set_here = frozenset(explicit or ()), derive_megatron(args).keys()
    derived, nccl = set_here - given, nccl_problems(args)
    out_of_range = list(value_checks.check_ranges(args, derived))
    problems = Problems(
        wrong=[
            *out_of_range,
            *value_checks.check_megatron_effects(args, given, set_here),
            *broken((*value_checks.TRAINING, *OFFLOADING), args, given),
            *nccl.wrong,
            *_family_problems(args.model_name),
        ],
        environment=[
            *filter(None, [shadowing_problem()]),
            *check_sharp_library(args),
            *nccl.environment,
            *(broken(value_checks.ON_CPU, args, given) if args.accelerator == "cpu" else ()),
            *MISSING_CHECKPOINT(args),
        ],
        unsupported=[*refused_flags(args, derived), *OTHER_OPTIMIZERS(args)],
    )
    if not args.custom_model_provider_path and not out_of_range:  # a hook's model need not be what the flags describe
        problems.extend(_described_model(args, hf_config, explicit))
    return problems


def _described_model(args: Args, hf_config: Mapping[str, Any] | None, explicit: Collection[str] | None) -> Problems:
    """What is wrong with the model that the flags describe, and with its layout and checkpoints."""
    if missing := [option_of(name) for name in REQUIRED_MODEL_FLAGS if not vars(args)[name]]:
        names = ", ".join(missing)
        return Problems([f"{names} not given; give the model's flags (scripts/models/*.sh) or --model-args-from-hf."])
    loads = {"--load": (args.load, args.ckpt_step), "--ref-load": (args.ref_load, args.ref_ckpt_step)}
    by_layout = layout_problems(args, hf_config, explicit) or [
        *check_indexer_stages(args, hf_config),
        *check_offloaded_layers(args),
        *check_recomputed_layers(args),
    ]
    problems = Problems(
        wrong=[*broken((*value_checks.MODEL, *ATTENTION, *EXPERTS), args), *by_layout],
        environment=[text for flag, place in loads.items() for text in checkpoint_shape_problems(args, flag, *place)],
        unsupported=[*broken(value_checks.BUILT_MODELS, args)],
    )
    if hf_config is not None:
        problems.wrong += config_mismatches(args, hf_config)
        problems.unsupported += unsupported_model(hf_config, has_own_layers=bool(args.spec and args.model_name))
    return problems


def _family_problems(model_name: str | None) -> list[str]:
    if model_name is None:
        return []
    try:
        family_of(model_name)
    except UsageError as error:
        return [f"--model-name {model_name}: {message}" for message in error.messages]
    return []


OTHER_OPTIMIZERS = Rule(
    lambda a: a.optimizer in ("sgd", "muon"),
    "--optimizer {optimizer} is not supported with --train-backend megatron: its distributed optimizer cuts matrices "
    "anywhere, and checkpoints no state but Adam's; use adam, or --train-backend fsdp.",
)
MISSING_CHECKPOINT = Rule(
    lambda a: a.exit_on_missing_checkpoint and classify_checkpoint(a.load) != "megatron",
    lambda a: (
        f"{'--load ' + a.load + ' has no Megatron checkpoint' if a.load else '--load is not given'}, and "
        "--exit-on-missing-checkpoint asks for one; correct the path or leave it out."
    ),
)


def checkpoint_shape_problems(args: Args, flag: str, path: str | None, step: int | None) -> list[str]:
    """Return a sentence for each model flag in which the Megatron checkpoint at `path` differs from `args`.

    One sentence where there is no checkpoint, or its .metadata names what would be run.
    """
    try:
        saved = saved_shape(path, step) or {}
    except UsageError as error:
        return [f"{flag}: {message}" for message in error.messages]
    ours = model_shape(args) if saved else {}
    return [
        f"{flag} {path} holds a model with {option_of(name)} {saved[name]}, the flags say {ours[name]}."
        for name in SHAPE_KEYS
        if name in saved and saved[name] is not None and ours[name] is not None and saved[name] != ours[name]
    ]


def teacher_problems(args: Args) -> list[str]:
    """Return a sentence for each number in which the teacher of --opd-teacher-load is another model than the actor."""
    path, step = args.opd_teacher_load, args.opd_teacher_ckpt_step
    kind = classify_checkpoint(path)
    is_described = all(vars(args)[name] for name in REQUIRED_MODEL_FLAGS) and not args.custom_model_provider_path
    if path is None or kind is None or not is_described:
        return []  # what is wrong then is said elsewhere
    remedy = "the trainer's teacher has the actor's architecture; serve another one and use --opd-type sglang"
    problems = model_differences(args, "--opd-teacher-load", path, step)
    problems = [f"{problem.removesuffix('.')}; {remedy}." for problem in problems]
    if kind == "hf" and step is not None:
        why = f"with --opd-teacher-load {path}, which is an HF directory"
        problems.append(
            NoEffect(f"--opd-teacher-ckpt-step {step}", why, "leave it out", instead={"opd_teacher_ckpt_step": None})
        )
    return problems


def model_differences(args: Args, what: str, path: str, step: int | None) -> list[str]:
    """Return a sentence for each number in which the checkpoint at `path` is another model than the flags describe.

    Args:
        args: the flags, whose model sizes are known.
        what: the flag or field that says `path`.
        path: Megatron root or HF directory.
        step: iteration of a Megatron root.
    """
    if classify_checkpoint(path) == "megatron":
        return checkpoint_shape_problems(args, what, path, step)
    try:
        differences = config_differences(args, json.loads((Path(path) / "config.json").read_text()))
    except (ValueError, UsageError) as error:
        return [f"{what} {path}: {error}"]
    return [
        f"{what} {path} is a model with {option_of(name)} {theirs}, the flags say {ours}."
        for name, ours, theirs in differences
    ]


def model_shape(args: Args) -> dict[str, Any]:
    """Return the numbers that a checkpoint's model must share with a run that loads it; saved as model_shape.json."""
    values, adapters = vars(args) | model_sizes(args), LoraPlan.of(args)
    return {name: values[name] for name in SHAPE_KEYS} | ({"lora": adapters.as_json()} if adapters else {})
