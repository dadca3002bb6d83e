"""The layers of our GPT models: Megatron's local spec with an RMSNorm and a packed attention that need no
TransformerEngine.

It describes dense layers (Llama, Qwen2, Qwen3), layers with experts (Qwen3-MoE, GLM-4.5), with latent attention
(DeepSeek-V3) and with norms after attention and MLP (GLM-4); it reads the flags of the model and builds nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.hf_config import moe_layer_pattern
from slime.backends.megatron_utils.model.grouped_experts import GroupedExperts
from slime.backends.megatron_utils.model.latent_attention import LatentAttention
from slime.backends.megatron_utils.model.routing import ReplayRouter
from slime.backends.megatron_utils.model.sandwich_layer import SandwichLayer, SandwichSubmodules
from slime.backends.megatron_utils.model.varlen_attention import VarlenAttention
from slime.utils import accelerator
from slime.utils.fusion import fused_on_cuda


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute by which Megatron sums its gradient over a sequence-parallel region.

    Megatron's own wrapper of torch's norms refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=accelerator.current_device())
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and type."""
        return _rms_norm(x, self.weight, self.eps or torch.finfo(x.dtype).eps)


@fused_on_cuda
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def layer_spec(config: TransformerConfig, args: argparse.Namespace, *, num_experts: int | None = None) -> ModuleSpec:
    """Return the spec of one transformer layer, dense without `num_experts`."""
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if num_experts:
        layer.mlp.submodules.router = ReplayRouter
        if config.moe_grouped_gemm:
            layer.mlp.submodules.experts.module = GroupedExperts
    if latent:
        layer.self_attention.module = LatentAttention
    attention = layer.self_attention.submodules
    attention.core_attention = VarlenAttention
    if config.qk_layernorm and latent:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if args.post_self_attn_layernorm or args.post_mlp_layernorm:
        parts = {field.name: vars(layer)[field.name] for field in dataclasses.fields(layer)}
        spec.module = SandwichLayer
        spec.submodules = SandwichSubmodules(
            **parts,
            post_self_attn_layernorm=RMSNorm if args.post_self_attn_layernorm else IdentityOp,
            post_mlp_layernorm=RMSNorm if args.post_mlp_layernorm else IdentityOp,
        )
    return spec


def last_layer_spec(config: TransformerConfig, args: argparse.Namespace) -> ModuleSpec:
    """Return the spec of the model's last layer."""
    has_experts = config.num_moe_experts and moe_layer_pattern(config.moe_layer_freq, config.num_layers)[-1]
    return layer_spec(config, args, num_experts=config.num_moe_experts if has_experts else None)


def block_spec(
    config: TransformerConfig, args: argparse.Namespace, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage, and of the final norm behind the last."""
    dense = layer_spec(config, args)
    layers = [dense] * config.num_layers
    if config.num_moe_experts:
        with_experts = layer_spec(config, args, num_experts=config.num_moe_experts)
        pattern = moe_layer_pattern(config.moe_layer_freq, config.num_layers)
        layers = [with_experts if has_experts else dense for has_experts in pattern]
    first = get_transformer_layer_offset(config, vp_stage)
    here = layers[first : first + get_num_layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=here, layer_norm=RMSNorm)
