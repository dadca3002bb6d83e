"""The layer of our GPT models: Megatron's local spec with an RMSNorm and a packed attention that need no
TransformerEngine.

It describes a dense layer (Llama, Qwen2, Qwen3); it reads the TransformerConfig and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.varlen_attention import VarlenAttention
from slime.utils import accelerator


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute by which Megatron sums its gradient over a sequence-parallel region.

    Megatron's own wrapper of torch's norms refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=accelerator.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of one dense transformer layer."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = VarlenAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the spec of all layers and the final norm."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * config.num_layers, layer_norm=RMSNorm)
