"""TransformerEngine's kernels in the layers of our models: --transformer-impl transformer_engine.

Linear layers and attention become Megatron's wrappers of TransformerEngine's modules; the parts that a layer consists
of stay, and with them the names of its weights, its checkpoints and what engines are sent. Megatron's own
specification of such layers fuses a norm into the linear layer behind it, which saves nothing in 16 bit and gives the
weights other names.

Not replaced: norms (TransformerEngine's took twice the time of ours on an H200), experts (slime's grouped product),
routers, the embedding, the output layer, and the down projections of latent attention, whose output a rank has to
gather (TransformerEngine's linear layers do not).

It is imported only where TransformerEngine is asked for; whether it can be is kernel_checks' business.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.backends.megatron_utils.layers.varlen_attention import VarlenAttention

REPLACED: dict[Any, type] = {
    ColumnParallelLinear: TEColumnParallelLinear,
    RowParallelLinear: TERowParallelLinear,
    VarlenAttention: TEDotProductAttention,
}
KEPT = ("experts", "router", "linear_q_down_proj", "linear_kv_down_proj")


def use_transformer_engine(layer: ModuleSpec) -> None:
    """Replace the modules of a layer's specification in place, those of its parts included.

    Args:
        layer: of one layer; no other shares it, though some of its parts may.
    """
    layer.submodules = _replaced(layer.submodules)


def _replaced(submodules: Any) -> Any:
    """A copy of the parts: experts and shared experts have one object for theirs."""
    parts = {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)}
    for name, part in parts.items():
        if name in KEPT:
            continue
        if isinstance(part, type):
            parts[name] = REPLACED.get(part, part)
        elif isinstance(part, ModuleSpec):
            inner = _replaced(part.submodules) if dataclasses.is_dataclass(part.submodules) else part.submodules
            parts[name] = dataclasses.replace(part, module=REPLACED.get(part.module, part.module), submodules=inner)
    return type(submodules)(**parts)
