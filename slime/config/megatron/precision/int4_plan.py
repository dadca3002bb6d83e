"""Training with the weights that an int4 engine computes with (OPEN_TRAINING_INT4_FAKE_QAT_FLAG).

The two environment variables are upstream slime's. They are read once, with the command line, and handed on to the
trainers in --train-env-vars; rounded_linear.py rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import Layout
from slime.config.megatron.precision.linear_plan import (
    EXPERTS,
    checkpoint_quantizes,
    known_format,
    linear_sizes,
    mlp_sizes,
)
from slime.config.problems import Check, Rule, broken
from slime.models.families import family_of_args
from slime.models.family import Family
from slime.utils.errors import UsageError
from slime.utils.model_shape import ModelShape
from slime.weights.formats import Int4Format, format_of_checkpoint

FLAG, GROUP_SIZE = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_FAKE_QAT_GROUP_SIZE"
OFF = ("", "0")


def int4_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the two variables that are set."""
    return {name: environment[name].strip() for name in (FLAG, GROUP_SIZE) if name in environment}


def is_asked_for(args: Args) -> bool:
    """Whether training shall round weights to int4."""
    return str(args.train_env_vars.get(FLAG, "")).strip() not in OFF


@dataclass(frozen=True)
class Int4Training:
    """The weights that are rounded.

    Attributes:
        fmt: of the engines' checkpoint.
        family: the names of its tensors.
        num_layers: of the model.
    """

    fmt: Int4Format
    family: Family
    num_layers: int

    @classmethod
    def of(cls, args: Args) -> Int4Training | None:
        """The plan of checked flags; None where nothing is rounded."""
        if not is_asked_for(args):
            return None
        fmt = format_of_checkpoint(args.hf_checkpoint)
        assert isinstance(fmt, Int4Format), f"--hf-checkpoint {args.hf_checkpoint} is not int4"  # checked before
        return cls(fmt, family_of_args(args), args.num_layers)

    def takes(self, layer: int, module: str) -> bool:
        """Whether the checkpoint has a linear layer ("mlp.linear_fc1") of a decoder layer, from 0, in int4."""
        return checkpoint_quantizes(self.fmt, self.family, self.num_layers, layer, module)


def check_int4_training(args: Args, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """What contradicts what where weights shall be rounded to int4 in training; one sentence each.

    Args:
        args: after derivation.
        hf_config: of --hf-checkpoint; None where it cannot be read, which is said elsewhere.
    """
    if not is_asked_for(args):
        return
    yield from broken(_RULES, args)
    fmt = known_format(hf_config)
    if hf_config is None:
        return
    if not isinstance(fmt, Int4Format):
        yield (
            f"{FLAG}={_value(args, FLAG)} rounds weights as engines in int4 have them, and --hf-checkpoint "
            f"{args.hf_checkpoint} is {fmt.kind if fmt else 'in 16 bit'}; make one with "
            "tools/convert_hf_to_int4_direct.py, or unset it."
        )
        return
    size = _value(args, GROUP_SIZE)
    if size not in ("", str(fmt.group_size)):
        yield (
            f"{GROUP_SIZE}={size}: --hf-checkpoint {args.hf_checkpoint} has groups of {fmt.group_size} columns, and "
            f"its engines round so; set it to {fmt.group_size}, or unset it."
        )
    yield from _check_shares(args, fmt)


def _value(args: Args, name: str) -> str:
    return str(args.train_env_vars.get(name, "")).strip()


def _check_shares(args: Args, fmt: Int4Format) -> Iterator[str]:
    """A tensor-parallel rank holds whole groups of the columns of what is rounded."""
    shape, layout = ModelShape.of(args), Layout.of(args)
    try:
        plan = Int4Training(fmt, family_of_args(args), args.num_layers)
    except UsageError:  # an unknown family, which is said elsewhere
        return
    if shape is None or args.custom_model_provider_path:
        return
    columns: dict[str, int] = {}
    for layer in range(shape.num_layers):
        sizes = linear_sizes(shape, layer, layout.tensor)
        if shape.experts is not None and shape.moe_layers[layer]:
            of_expert = mlp_sizes(shape.hidden_size, shape.experts.ffn_hidden_size // layout.expert_tensor)
            sizes |= {f"{EXPERTS}.local_experts.0.{name}": size for name, size in of_expert.items()}
        columns |= {name: size.columns for name, size in sizes.items() if plan.takes(layer, name)}
    for name, width in columns.items():
        if width % fmt.group_size:
            flag, ranks = "--tensor-model-parallel-size", layout.tensor
            if EXPERTS in name:
                flag, ranks = "--expert-tensor-parallel-size", layout.expert_tensor
            yield (
                f"{FLAG}={_value(args, FLAG)} with {flag} {ranks}: a rank has {width} columns of {name}, which are "
                f"not whole groups of {fmt.group_size} (--hf-checkpoint); change the layout, or unset it."
            )
    if not columns:
        yield f"{FLAG}: --hf-checkpoint {args.hf_checkpoint} has no linear layer in int4; unset it."


_RULES: tuple[Check, ...] = (
    Rule(
        lambda a: _value(a, FLAG) != "1",
        lambda a: f"{FLAG}={_value(a, FLAG)!r} is neither 1 nor 0; set it to 1, or unset it.",
    ),
    Rule(
        lambda a: a.train_backend != "megatron",
        f"{FLAG}: rounding weights to int4 in training is not built for --train-backend {{train_backend}}; use "
        "--train-backend megatron, or unset it.",
    ),
    Rule(
        lambda a: a.lora_rank is not None,
        f"{FLAG} with --lora-rank {{lora_rank}}: the base under adapters is not trained, and --ref-load may be the "
        "int4 checkpoint, whose weights engines have; unset it.",
    ),
    Rule(
        lambda a: a.transformer_impl != "local",
        f"{FLAG} with --transformer-impl {{transformer_impl}}: its layers have products of their own; give "
        "--transformer-impl local, or unset it.",
    ),
    Rule(
        lambda a: a.fp8,
        f"{FLAG} with --fp8-format {{fp8}}: both say what a weight is rounded to; leave one of them out.",
    ),
)
