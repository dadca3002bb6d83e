"""Which linear layers are trained in fp8 (--fp8-format e4m3 --fp8-recipe blockwise), and what cannot be.

A weight is quantised in blocks of 128 x 128, and all three of its products sum over blocks of 128, so that both of its
sizes on a rank are multiples of it; other layers stay in 16 bit. Where the engines' checkpoint is fp8, the blocks are
its blocks, and what it keeps in 16 bit stays so here. fp8_linears.py computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import Layout
from slime.config.megatron.precision.fp8_forward_plan import MOE_LAYERS, given_flags
from slime.config.megatron.precision.linear_plan import BLOCK, LinearSize, checkpoint_quantizes, linear_sizes
from slime.config.problems import Check, Problems, Rule, broken, first_of
from slime.models.families import family_of_args
from slime.models.family import Family
from slime.utils import accelerator
from slime.utils.errors import UsageError, sentences
from slime.utils.model_shape import ModelShape
from slime.weights.formats import DEFAULT_BLOCK, Fp8Format, WeightFormat, format_of_checkpoint, weight_format_of

FLAGS = "--fp8-format e4m3 --fp8-recipe blockwise"
HOPPER = (9, 0)
FIRST_CUDA = (12, 9)
"""The first whose cuBLAS multiplies with scales of 128 x 128."""


@dataclass(frozen=True)
class Fp8Training:
    """The linear layers that are trained in fp8.

    Attributes:
        fmt: of the engines' checkpoint; where that is in 16 bit, blocks of 128 x 128 of all linear layers.
        family: the names of its tensors.
        sizes: of each layer, a rank's share of its linear layers outside of experts.
    """

    fmt: Fp8Format
    family: Family
    sizes: tuple[Mapping[str, LinearSize], ...]

    @classmethod
    def of(cls, args: Args) -> Fp8Training | None:
        """The plan of checked flags; None where nothing is trained in fp8."""
        return cls._with(args, format_of_checkpoint(args.hf_checkpoint)) if args.fp8 else None

    @classmethod
    def _with(cls, args: Args, fmt: WeightFormat | None) -> Fp8Training:
        shape, tensor = ModelShape.of(args), Layout.of(args).tensor
        assert shape is not None, "the flags do not describe the model"  # checked before
        return cls(
            fmt if isinstance(fmt, Fp8Format) else Fp8Format(),
            family_of_args(args),
            tuple(linear_sizes(shape, layer, tensor) for layer in range(shape.num_layers)),
        )

    def takes(self, layer: int, module: str) -> bool:
        """Whether a linear layer ("mlp.linear_fc1") of a decoder layer, from 0, is trained in fp8."""
        size = self.sizes[layer].get(module)
        if size is None or size.rows % BLOCK or size.columns % BLOCK:
            return False
        return checkpoint_quantizes(self.fmt, self.family, len(self.sizes), layer, module)

    def left_out(self) -> dict[str, LinearSize]:
        """Linear layers that stay in 16 bit, by name, with the size of the first of each name."""
        found: dict[str, LinearSize] = {}
        for layer, sizes in enumerate(self.sizes):
            for name, size in sizes.items():
                if not self.takes(layer, name):
                    found.setdefault(name, size)
        return found


def fp8_training_problems(args: Args, hf_config: Mapping[str, Any] | None, *, looks: bool) -> Problems:
    """What is wrong with training in fp8.

    Args:
        args: after derivation.
        hf_config: the dict of --hf-checkpoint's config.json; None where it cannot be read.
        looks: the run is to be on this machine.
    """
    problems = Problems()
    if not args.fp8:
        return problems
    problems.wrong += broken(_RULES, args)
    problems.environment += _MACHINE(args) if looks else ()
    if not problems.wrong and hf_config is not None:
        problems.extend(_layer_problems(args, hf_config))
    return problems


def _layer_problems(args: Args, hf_config: Mapping[str, Any]) -> Problems:
    if ModelShape.of(args) is None:  # said elsewhere
        return Problems()
    try:
        fmt = weight_format_of(hf_config)
        plan = Fp8Training._with(args, fmt)
    except UsageError:  # an unknown family or format, which is said elsewhere
        return Problems()
    stay = ", ".join(f"{name} ({size.rows} x {size.columns})" for name, size in plan.left_out().items())
    takes_any = any(plan.takes(layer, name) for layer, sizes in enumerate(plan.sizes) for name in sizes)
    wrong = sentences(
        (
            fmt is not None and (not isinstance(fmt, Fp8Format) or fmt.block_size != DEFAULT_BLOCK),
            f"{FLAGS}: the engines of --hf-checkpoint {args.hf_checkpoint} have weights in {fmt and fmt.kind} with "
            f"other scales than one a block of {BLOCK} x {BLOCK}, so that they would not have the values that are "
            "trained; use a checkpoint in 16 bit, or one of tools/convert_hf_to_fp8.py.",
        ),
        (
            not takes_any,
            f"{FLAGS}: a rank has no linear layer outside of experts that is whole blocks of {BLOCK} x {BLOCK} and "
            f"not kept in 16 bit by the checkpoint: {stay or 'none'} (rows of a head, of a gate, or all); leave "
            "--fp8-format out.",
        ),
    )
    notes = sentences(
        (
            takes_any and stay,
            f"{FLAGS}: these linear layers stay in 16 bit in some layers, as they are no whole blocks of {BLOCK} x "
            f"{BLOCK} on a rank (rows of a head, of a gate, or all), or the checkpoint keeps them so: {stay}.",
        ),
        (
            args.num_moe_experts and not args.megatron_deepgemm_moe_forward_layers,
            f"{FLAGS}: experts are trained in 16 bit; {MOE_LAYERS} computes their forward pass in fp8.",
        ),
    )
    return Problems(wrong=[*wrong], notes=[*notes])


_LEAVE = "leave --fp8-format out"
_RULES: tuple[Check, ...] = (
    Rule(
        lambda a: a.fp8 != "e4m3",
        "--fp8-format {fp8} is not built: weights, inputs and gradients are all e4m3; give e4m3.",
    ),
    Rule(
        lambda a: a.fp8_recipe != "blockwise",
        "--fp8-recipe {fp8_recipe} is not built: scales are one for 1 x 128 inputs and one for 128 x 128 weights; "
        "give --fp8-recipe blockwise.",
    ),
    Rule(lambda a: a.accelerator != "cuda", f"--fp8-format {{fp8}} needs CUDA, not {{accelerator}}; {_LEAVE}."),
    Rule(lambda a: not a.bf16, "--fp8-format {fp8} needs --bf16: between products there is bf16; give it, too."),
    Rule(
        lambda a: a.transformer_impl != "local",
        "--fp8-format {fp8} with --transformer-impl {transformer_impl}: slime's own products in fp8 belong to the "
        "local layers; give --transformer-impl local.",
    ),
    Rule(
        lambda a: a.spec or a.custom_model_provider_path,
        f"--fp8-format {{fp8}} is built for the layers of docs/model_families.md, not for those of --spec and "
        f"--custom-model-provider-path; {_LEAVE}.",
    ),
    Rule(
        lambda a: a.lora_rank is not None,
        f"--fp8-format {{fp8}} with --lora-rank {{lora_rank}}: adapters change what is quantised; {_LEAVE}.",
    ),
    Rule(
        lambda a: a.megatron_deepgemm_forward_layers is not None,
        lambda a: (
            f"--fp8-format {a.fp8} and {given_flags(a)[0]} both say how the forward pass of linear layers is "
            "computed; leave the second out."
        ),
    ),
)


def _card() -> str:
    number = ".".join(map(str, accelerator.compute_capability() or ()))
    return f"{accelerator.gpu_name()} (compute capability {number})"


_MACHINE = first_of(
    Rule(
        lambda a: accelerator.compute_capability() not in (None, HOPPER),
        lambda a: (
            f"--fp8-format {a.fp8}: cuBLAS multiplies e4m3 with scales of 1 x 128 and 128 x 128 on Hopper GPUs alone, "
            f"and this machine has {_card()}; {_LEAVE}."
        ),
    ),
    Rule(
        lambda a: _cuda() is not None and (_cuda() or ()) < FIRST_CUDA,
        lambda a: (
            f"--fp8-format {a.fp8} needs CUDA {FIRST_CUDA[0]}.{FIRST_CUDA[1]} or later, and torch is built with "
            f"{accelerator.cuda_version()}; {_LEAVE}."
        ),
    ),
)


def _cuda() -> tuple[int, ...] | None:
    version = accelerator.cuda_version()
    return None if version is None else tuple(map(int, version.split(".")[:2]))
