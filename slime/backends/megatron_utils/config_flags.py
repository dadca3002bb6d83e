"""Megatron's config dataclasses as command-line flags, and back from `args` to a config's arguments.

A field's flag has the name, type, choices, default and help that the dataclass itself gives (its `argparse_meta`,
type hint and docstring). Only the fields listed here become flags: those that have an effect on the models and
optimizers that are built. It knows nothing about slime's own flags, except that an option which the parser already
has is left alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
import warnings
from typing import Any

PARALLEL_FIELDS = [
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "deterministic_mode",
]
MODEL_FIELDS = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "softmax_scale",
    "fp32_residual_connection",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "normalization",
    "qk_layernorm",
    "init_method_std",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "disable_bf16_reduced_precision_matmul",
    "calculate_per_token_loss",
]
OPTIMIZER_FIELDS = [
    "lr",
    "min_lr",
    "weight_decay",
    "apply_wd_to_qk_layernorm",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "decoupled_weight_decay",
    "overlap_param_gather",
    "clip_grad",
    "log_num_zeros_in_grad",
]
DDP_FIELDS = [
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "align_param_gather",
    "bucket_size",
    "average_in_collective",
]


class FlagAdder:
    """Adds flags to one titled group of a parser and leaves alone what the parser already has."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._parser = parser
        self._group = parser.add_argument_group(title)

    def add(self, *names: str, **options: Any) -> None:
        """Like `add_argument`; an option that the parser already has keeps the meaning it has there."""
        free = [name for name in names if name not in self._parser._option_string_actions]
        if free:
            self._group.add_argument(*free, **options)


def megatron_configs() -> dict[str, type]:
    """Return Megatron's config dataclasses by a short name (imports megatron-core)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # absent TransformerEngine and Apex, which we do without
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import TransformerConfig
    return {
        "parallel": ModelParallelConfig,
        "model": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each listed field of Megatron's configs."""
    configs = megatron_configs()
    listed = {"parallel": PARALLEL_FIELDS, "model": MODEL_FIELDS, "optimizer": OPTIMIZER_FIELDS, "ddp": DDP_FIELDS}
    for key, names in listed.items():
        adder = FlagAdder(parser, f"megatron: {configs[key].__name__}")
        fields = {field.name: field for field in dataclasses.fields(configs[key])}
        hints, docs = typing.get_type_hints(configs[key]), field_docs(configs[key])
        for name in names:
            options, option_names = flag_of_field(fields[name], hints[name])
            adder.add(*option_names, dest=name, help=docs.get(name, "").replace("%", "%%"), **options)


def flag_of_field(field: dataclasses.Field[Any], hint: Any) -> tuple[dict[str, Any], list[str]]:
    """Return (options for add_argument, option strings) of one config field.

    Raises:
        TypeError: when the field's type has no simple form on a command line.
    """
    meta = dict(field.metadata.get("argparse_meta", {}))
    option = "--" + field.name.replace("_", "-")
    default = meta.get("default", field.default)
    hint = _without_none(hint)
    if hint is bool:
        if field.default is True:
            return {"action": "store_false", "default": default}, meta.get(
                "arg_names", [option.replace("--", "--no-", 1)]
            )
        return {"action": "store_true", "default": default}, meta.get("arg_names", [option])
    options: dict[str, Any] = {"default": default}
    if typing.get_origin(hint) is typing.Literal:
        options["choices"] = list(typing.get_args(hint))
    elif typing.get_origin(hint) is list:
        options |= {"nargs": "+", "type": typing.get_args(hint)[0]}
    elif hint in (int, float, str):
        options["type"] = hint
    else:
        raise TypeError(f"config field {field.name} has type {hint}, which has no form as a flag.")
    return options, meta.get("arg_names", [option])


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, on one line, inherited fields included."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for before, after in zip(statements, statements[1:], strict=False):
            if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                docs[before.target.id] = " ".join(str(after.value.value).split())
    return docs


def config_kwargs(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return what `args` says about the fields of a Megatron config: {field: value} for the attributes that exist."""
    values = vars(args)
    return {field.name: values[field.name] for field in dataclasses.fields(config) if field.name in values}
