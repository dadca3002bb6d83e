"""Which linear layers compute their forward pass in fp8 (--megatron-deepgemm-*), and which cannot.

The forward pass is to be the engine's, so what counts is what the engine computes: the checkpoint has to be one of fp8
blocks, a layer that it keeps in 16 bit stays so here, and the blocks of a rank's share of a weight have to be blocks
of the HF tensors. A block of 128 rows must therefore not hold the end of one tensor and the start of the next one: not
two heads that are neighbours only in Megatron's order of rows, nor a gate and its up projection. It reads flags and
config.json and computes nothing; fp8_linears.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import Layout
from slime.config.megatron.precision.linear_plan import (
    BLOCK,
    EXPERTS,
    OF_EXPERT,
    LinearSize,
    checkpoint_quantizes,
    known_format,
    linear_sizes,
    mlp_sizes,
)
from slime.config.problems import Check, Rule, broken, for_each, where
from slime.models.families import family_of_args
from slime.models.family import Family
from slime.utils.errors import UsageError
from slime.utils.model_shape import ModelShape
from slime.weights.formats import DEFAULT_BLOCK, Fp8Format, format_of_checkpoint

LAYERS, MODULES = "--megatron-deepgemm-forward-layers", "--megatron-deepgemm-forward-modules"
MOE_LAYERS, MOE_MODULES = "--megatron-deepgemm-moe-forward-layers", "--megatron-deepgemm-moe-forward-modules"


@dataclass(frozen=True)
class Fp8Choice:
    """What the flags choose.

    Attributes:
        layers: decoder layers of the whole model, from 0, whose linear layers are chosen.
        modules: ends of the names of these; None: all.
        expert_layers: decoder layers whose experts are.
        fmt: of the engines' checkpoint.
        family: the names of its tensors.
        num_layers: of the model.
    """

    layers: frozenset[int]
    modules: tuple[str, ...] | None
    expert_layers: frozenset[int]
    fmt: Fp8Format
    family: Family
    num_layers: int

    @classmethod
    def of(cls, args: Args) -> Fp8Choice | None:
        """The choice of checked flags; None where nothing computes in fp8."""
        if args.megatron_deepgemm_forward_layers is None and args.megatron_deepgemm_moe_forward_layers is None:
            return None
        fmt = format_of_checkpoint(args.hf_checkpoint)
        assert isinstance(fmt, Fp8Format), f"--hf-checkpoint {args.hf_checkpoint} is not fp8"  # checked at parse time
        return cls._with(args, fmt)

    @classmethod
    def _with(cls, args: Args, fmt: Fp8Format) -> Fp8Choice:
        modules = args.megatron_deepgemm_forward_modules
        return cls(
            frozenset(args.megatron_deepgemm_forward_layers or ()),
            None if modules is None else tuple(modules),
            frozenset(args.megatron_deepgemm_moe_forward_layers or ()),
            fmt,
            family_of_args(args),
            args.num_layers,
        )

    def takes(self, layer: int, module: str) -> bool:
        """Whether a linear layer outside of experts ("self_attention.linear_proj") computes in fp8."""
        if layer not in self.layers or not (self.modules is None or any(ends_with(module, m) for m in self.modules)):
            return False
        return self.engine_quantizes(layer, module)

    def engine_quantizes(self, layer: int, module: str) -> bool:
        """Whether the checkpoint has all HF tensors of a linear layer in fp8; not where no rule names it."""
        return checkpoint_quantizes(self.fmt, self.family, self.num_layers, layer, module)


def ends_with(name: str, suffix: str) -> bool:
    """Whether a dotted name ends with the parts of `suffix`."""
    return name == suffix or name.endswith("." + suffix)


def check_fp8_forward(args: Args, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """What contradicts what among the flags of a forward pass in fp8; one sentence each.

    Args:
        args: after derivation.
        hf_config: of --hf-checkpoint; None where it cannot be read, which is said elsewhere.
    """
    given = given_flags(args)
    if not given:
        return
    yield from broken(_MACHINE, args)
    found = known_format(hf_config)
    fmt = found if isinstance(found, Fp8Format) else None
    if hf_config is not None and (fmt is None or fmt.block_size != DEFAULT_BLOCK):
        how = "in 16 bit" if not hf_config.get("quantization_config") else "with other scales than one a block of 128"
        yield (
            f"{' '.join(given)}: the engines of --hf-checkpoint {args.hf_checkpoint} compute {how}, and the forward "
            "pass is meant to be theirs; convert it with tools/convert_hf_to_fp8.py, or leave the flag out."
        )
    shape = None if args.custom_model_provider_path or args.spec else ModelShape.of(args)
    out_of_range = list(_check_range(args))
    yield from (*out_of_range, *_check_experts(args))
    if fmt is None or shape is None or out_of_range:
        return
    try:
        choice = Fp8Choice._with(args, fmt)
    except UsageError:  # an unknown family, which is said elsewhere
        return
    layout = Layout.of(args)
    yield from _check_modules(choice, shape, layout.tensor)
    yield from _check_expert_sizes(choice, shape, layout.expert_tensor)


def given_flags(args: Args) -> list[str]:
    """The flags of layers that are given."""
    return [flag for flag, name in _LAYER_FLAGS.items() if vars(args)[name] is not None]


_LAYER_FLAGS = {LAYERS: "megatron_deepgemm_forward_layers", MOE_LAYERS: "megatron_deepgemm_moe_forward_layers"}


def _no_layers(args: Args, flag: str) -> list[int]:
    return [layer for layer in vars(args)[_LAYER_FLAGS[flag]] or () if not 0 <= layer < (args.num_layers or 1)]


_MACHINE: tuple[Check, ...] = (
    Rule(
        lambda a: a.accelerator != "cuda",
        lambda a: (
            f"{' '.join(given_flags(a))} needs CUDA: DeepGEMM has no kernels for --accelerator {a.accelerator}; leave "
            "it out."
        ),
    ),
    Rule(
        lambda a: not a.bf16,
        lambda a: (
            f"{' '.join(given_flags(a))} needs --bf16: DeepGEMM's products are in bf16; give it, or leave "
            f"{' '.join(given_flags(a))} out."
        ),
    ),
)
_check_range = for_each(
    lambda a: _LAYER_FLAGS,
    _no_layers,
    lambda a, flag: (
        f"{flag} {_listed(_no_layers(a, flag))}: the model has {a.num_layers} decoder layers, 0 to "
        f"{(a.num_layers or 1) - 1}; choose among them."
    ),
)
_check_experts = where(
    lambda a: MOE_LAYERS in given_flags(a),
    Rule(
        lambda a: not a.num_moe_experts,
        f"{MOE_LAYERS} is for layers with experts, and the model has none; leave it out, or use {LAYERS}.",
    ),
    Rule(
        lambda a: a.num_moe_experts and not a.moe_grouped_gemm,
        f"{MOE_LAYERS} computes the experts of a rank as one product; give --moe-grouped-gemm, too.",
    ),
    for_each(
        lambda a: a.megatron_deepgemm_moe_forward_modules or (),
        lambda a, suffix: not ends_with(EXPERTS, suffix),
        lambda a, suffix: (
            f"{MOE_MODULES} {suffix} names no experts; they are {EXPERTS}, the default, so leave it out."
        ),
    ),
)


def _check_modules(choice: Fp8Choice, shape: ModelShape, tensor: int) -> Iterator[str]:
    sizes = {layer: linear_sizes(shape, layer, tensor) for layer in sorted(choice.layers)}
    known = sorted({name for of_layer in sizes.values() for name in of_layer})
    for suffix in choice.modules or ():
        places = [(i, name) for i, of_layer in sizes.items() for name in of_layer if ends_with(name, suffix)]
        if not places:
            yield f"{MODULES} {suffix} matches no linear layer of layers {_listed(sizes)}; there are {_listed(known)}."
        elif not any(choice.engine_quantizes(*place) for place in places):
            yield (
                f"{MODULES} {suffix}: the checkpoint keeps it in 16 bit (modules_to_not_convert), and so do the "
                "engines; leave it out."
            )
    taken = [(layer, name) for layer, of_layer in sizes.items() for name in of_layer if choice.takes(layer, name)]
    if sizes and choice.modules is None and not taken:
        yield f"{LAYERS} {_listed(sizes)}: the checkpoint has none of their linear layers in fp8; leave it out."
    for name in dict.fromkeys(name for _, name in taken):
        size = next(sizes[layer][name] for layer, other in taken if other == name)
        if not size.fits:
            yield _misfit(f"{LAYERS}: {name}", size, f"--tensor-model-parallel-size {tensor}", f" of {MODULES}")


def _check_expert_sizes(choice: Fp8Choice, shape: ModelShape, tensor: int) -> Iterator[str]:
    if shape.experts is None:
        return
    if dense := [layer for layer in sorted(choice.expert_layers) if not shape.moe_layers[layer]]:
        yield f"{MOE_LAYERS} {_listed(dense)}: these layers have no experts; leave them out."
    with_experts = [layer for layer in sorted(choice.expert_layers) if shape.moe_layers[layer]]
    for layer in with_experts:
        if not all(choice.engine_quantizes(layer, name) for name in OF_EXPERT):
            yield f"{MOE_LAYERS} {layer}: the checkpoint keeps its experts in 16 bit; leave the layer out."
    for name, size in mlp_sizes(shape.hidden_size, shape.experts.ffn_hidden_size // tensor).items():
        if with_experts and not size.fits:
            yield _misfit(f"{MOE_LAYERS}: {name}", size, f"--expert-tensor-parallel-size {tensor}", "")


def _misfit(what: str, size: LinearSize, layout: str, where: str) -> str:
    return (
        f"{what} with {layout}: a rank has {size.rows} rows (of a head, of a gate, or all) and {size.columns} "
        f"columns, which are not blocks of {BLOCK} as the engine has them; change the layout, or leave it out{where}."
    )


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
