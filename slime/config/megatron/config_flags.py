"""The fields of Megatron's config dataclasses as command-line options.

A field's option has the type, choices, default and help that the dataclass gives (type hint, `argparse_meta`,
docstring) and the name that Megatron-LM's parser gives it; its attribute is the field's name. Asking the dataclasses
means importing megatron-core and torch, so the answer is kept in a table (slime.config.option_table). Fields
without a simple form are declared in parser_flags.py, or are no options (NO_OPTION). Which option has an effect is
megatron_flags.py's business.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.metadata
import inspect
import textwrap
import types
import typing
import warnings
from typing import Any, NamedTuple

from slime.config.option_table import cached_table

# field -> option, where Megatron-LM's name is neither in `argparse_meta` nor the field's name
NAMES = {
    "attention_output_gate": "--attention-output-gate --use-gated-attention",
    "average_in_collective": "--ddp-average-in-collective",
    "bucket_size": "--ddp-bucket-size",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "muon_split_qkv": "--muon-no-split-qkv",
    "nccl_ub": "--use-nccl-ub",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "num_moe_experts": "--num-experts",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_split_ag": "--disable-tp-comm-split-ag",
    "tp_comm_split_rs": "--disable-tp-comm-split-rs",
}
# field -> option that turns it off: False in the dataclass, and on by default in Megatron-LM's parser
ON_BY_DEFAULT = {
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "persist_layer_norm": "--no-persist-layer-norm",
}
# field -> default here, where it is not the dataclass's: as Megatron-LM's parser has it, or as our model needs it
DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,  # old log-probs under another dropout mask would be another policy's
    "hidden_dropout": 0.0,
    "kv_lora_rank": 32,
    "min_lr": 0.0,
    "muon_momentum": 0.9,
    "optimizer_offload_fraction": 1.0,
    "q_lora_rank": None,
    "rotary_scaling_factor": 1.0,
    "transformer_impl": "local",  # TransformerEngine is used where it is asked for
}
# field -> default of Megatron-LM's parser, and so of upstream, where it is another than here; --help names both
UPSTREAM_DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "transformer_impl": "transformer_engine",
}
# field -> why it is no option of its own
NO_OPTION = {
    field: why
    for why, fields in {
        "an object of the running process": "timers finalize_model_grads_func grad_scale_func no_sync_func "
        "grad_sync_func param_sync_func _cpu_offloading_context init_method output_layer_init_method "
        "embedding_init_method quant_recipe",
        "follows from --bf16 and --fp16": "params_dtype pipeline_dtype autocast_dtype",
        "follows from --swiglu": "activation_func gated_linear_unit bias_activation_fusion",
        "follows from --num-layers-per-virtual-pipeline-stage": "virtual_pipeline_model_parallel_size",
        "the opposite of --no-overlap-p2p-communication": "batch_p2p_comm",
        "follows from --fp8-param-gather": "fp8_param",
        "see --no-align-param-gather": "align_param_gather",
        "see --no-check-for-nan-in-loss-and-grad": "check_for_nan_in_grad",
        "see --attention-softmax-in-fp32": "attention_softmax_in_fp32",
        "a property of the model's class": "is_hybrid_model heterogeneous_block_specs hetereogenous_dist_checkpoint "
        "deallocate_pipeline_outputs",
    }.items()
    for field in fields.split()
}


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


class Row(NamedTuple):
    """One option.

    Attributes:
        names: its option strings, separated by spaces.
        help: one line.
        type: of the value; bool for a switch.
        default: a switch that is True by default turns its attribute off.
        dest: attribute, where it is not the first name's.
        choices, nargs: as for argparse.
        const: a switch that sets another option's attribute (`dest`) to this value.
    """

    names: str
    help: str
    type: Any = bool
    default: Any = None
    dest: str | None = None
    choices: tuple[Any, ...] | None = None
    nargs: str | None = None
    const: Any = None

    def add_to(self, flags: FlagAdder) -> None:
        """Add it, unless the parser has it."""
        options: dict[str, Any] = {"help": self.help}
        if self.dest is not None:
            options["dest"] = self.dest
        if self.const is not None:
            options |= {"action": "store_const", "const": self.const, "default": self.default}
        elif self.type is bool:
            options |= {"action": "store_false" if self.default else "store_true"}
        else:
            options |= {"type": self.type, "default": self.default, "choices": self.choices, "nargs": self.nargs}
        flags.add(*self.names.split(), **options)


def megatron_configs() -> dict[str, type]:
    """Return Megatron's config dataclasses by a short name (imports megatron-core)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # absent TransformerEngine and Apex, which we do without
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    return {
        "parallel": ModelParallelConfig,
        "model": TransformerConfig,
        "mla": MLATransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of Megatron's configs, except options that the parser already has.

    The first call for a version of megatron-core imports it, later ones read the table that the first has written.
    """
    version = importlib.metadata.version("megatron-core")
    cached_table("megatron-core", {"megatron-core": version}, _add_all_fields).add_to(parser)


def _add_all_fields(parser: argparse.ArgumentParser) -> None:
    seen = set(NO_OPTION)
    for config in megatron_configs().values():
        adder = FlagAdder(parser, f"megatron: {config.__name__}")
        hints, docs = typing.get_type_hints(config), field_docs(config)
        for field in dataclasses.fields(config):
            if field.name in seen:
                continue
            seen.add(field.name)
            try:
                options, names = flag_of_field(field, hints[field.name])
            except TypeError:
                continue  # declared in parser_flags.py; a test compares
            text = docs.get(field.name, "").replace("%", "%%")
            if field.name in UPSTREAM_DEFAULTS:
                text += f" (default: {options['default']}; upstream's: {UPSTREAM_DEFAULTS[field.name]})"
            adder.add(*names, dest=field.name, help=text, **options)


def flag_of_field(field: dataclasses.Field[Any], hint: Any) -> tuple[dict[str, Any], list[str]]:
    """Return (options for add_argument, option strings) of one config field.

    Raises:
        TypeError: when the field's type has no simple form on a command line.
    """
    meta = dict(field.metadata.get("argparse_meta", {}))
    option = "--" + field.name.replace("_", "-")
    names = NAMES[field.name].split() if field.name in NAMES else meta.get("arg_names")
    hint = _without_none(hint)
    if hint is bool and field.name in ON_BY_DEFAULT:
        return {"action": "store_false", "default": True}, [ON_BY_DEFAULT[field.name]]
    default = _default_of(field, meta)
    if hint is bool and field.default is True:
        return {"action": "store_false", "default": default}, names or [option.replace("--", "--no-", 1)]
    if hint is bool:
        return {"action": "store_true", "default": default}, names or [option]
    options: dict[str, Any] = {"default": default}
    if typing.get_origin(hint) is typing.Literal:
        options["choices"] = list(typing.get_args(hint))
    elif typing.get_origin(hint) is list and typing.get_args(hint)[0] in (int, float, str):
        options |= {"nargs": "+", "type": typing.get_args(hint)[0]}
    elif hint in (int, float, str):
        options["type"] = hint
    else:
        raise TypeError(f"config field {field.name} has type {hint}, which has no form as a flag.")
    return options, names or [option]


def _default_of(field: dataclasses.Field[Any], meta: dict[str, Any]) -> Any:
    if field.name in DEFAULTS:
        return DEFAULTS[field.name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return meta.get("default", field.default)


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
