"""Qwen3-Next and Qwen3.5: layers with a gated delta net between layers with full, gated attention.

Which layer is which, --linear-attention-freq says. Attention, its output gate, experts and norms are Megatron's own
and slime's (slime.backends.megatron_utils.model.spec).
"""

from __future__ import annotations

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.utils.model_shape import linear_attention_pattern
from slime_plugins.models.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules


def get_qwen3_next_spec(
    args: Args, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage."""
    is_linear = linear_attention_pattern(config.linear_attention_freq, config.num_layers)

    def adapt(layer: ModuleSpec, index: int) -> None:
        if is_linear[index]:
            layer.submodules.self_attention = delta_net_spec(args.qwen_gdn_backend)

    return assemble_block(args, config, vp_stage, adapt)


def delta_net_spec(kernels: str) -> ModuleSpec:
    """The spec of a gated delta net in the place of self-attention; `kernels` as --qwen-gdn-backend has it."""
    backend = LocalSpecProvider()
    parts = GatedDeltaNetSubmodules(in_proj=backend.column_parallel_linear(), out_proj=backend.row_parallel_linear())
    return ModuleSpec(module=GatedDeltaNet, params={"backend": kernels}, submodules=parts)
