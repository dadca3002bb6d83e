"""The layers of our GPT models: Megatron's local spec with an RMSNorm and a packed attention that need no
TransformerEngine, or with its modules where --transformer-impl asks for them.

It describes dense layers (Llama, Qwen2, Qwen3), layers with experts (Qwen3-MoE, GLM-4.5), with latent attention
(DeepSeek-V3) and with norms after attention and MLP (GLM-4); it reads the flags of the model and builds nothing.
Layers of other kinds are slime_plugins.models', loaded by path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts
from slime.backends.megatron_utils.layers.routing import ReplayRouter
from slime.backends.megatron_utils.layers.varlen_attention import LatentAttention, VarlenAttention
from slime.config.args import Args
from slime.models.hf_config import moe_layer_pattern
from slime.utils import accelerator
from slime.utils.accelerator.fusion import kernel_on_cuda
from slime.utils.misc import hook_args, load_function

OF_VARIANT = {
    "gated_delta_net": "slime_plugins.models.qwen3_next.get_qwen3_next_spec",
    "dsa": "slime_plugins.models.glm5.glm5.get_glm5_spec",
}
"""--experimental-attention-variant -> what makes the spec of a block of such layers."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute by which Megatron sums its gradient over a sequence-parallel region.

    Megatron's own wrapper of torch's norms refuses sequence parallelism. With --apply-layernorm-1p the weight is the
    difference to 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=accelerator.current_device())
        self.weight.sequence_parallel = config.sequence_parallel
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        if self.is_zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and type."""
        eps = self.eps or torch.finfo(x.dtype).eps
        return rms_norm(x, self.weight, eps, self.is_zero_centered)


@kernel_on_cuda("slime.backends.megatron_utils.kernels.small.rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
    if not is_zero_centered:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    # In fp32: 1 + weight has fewer digits in 16 bit than the weight.
    return torch.nn.functional.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


@dataclasses.dataclass
class SandwichSubmodules(TransformerLayerSubmodules):
    """Megatron's submodules and the two norms; IdentityOp leaves a norm out."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class SandwichLayer(TransformerLayer):
    """x + post_self_attn_layernorm(attention(norm(x))), then the same around the MLP; [s, b, h] -> [s, b, h].

    Megatron's layer (0.16.1) has no norms after attention and MLP, before each is added to the residual (GLM-4).
    """

    def __init__(self, config: TransformerConfig, submodules: SandwichSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        size = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, **size)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, **size)
        # The step that adds to the residual is the only one that sees what attention and MLP return.
        self.self_attn_bda = _after(self.post_self_attn_layernorm, build_module(submodules.self_attn_bda))
        self.mlp_bda = _after(self.post_mlp_layernorm, build_module(submodules.mlp_bda))


def _after(norm: torch.nn.Module, get_bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """`get_bias_dropout_add` with the norm before it; it gets x with its bias, and the residual that x is added to."""

    def get(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = get_bias_dropout_add(training, fused)

        def run(
            x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            x, bias = x_with_bias
            return add((norm(x if bias is None else x + bias), None), residual, dropout)

        return run

    return get


def layer_spec(config: TransformerConfig, args: Args, *, num_experts: int | None = None) -> ModuleSpec:
    """Return the spec of one transformer layer, dense without `num_experts`; no other layer shares it."""
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
    if config.transformer_impl == "transformer_engine":
        spec.submodules = _with_transformer_engine(spec.submodules)
    return spec


KEPT_FROM_TE = ("experts", "router", "linear_q_down_proj", "linear_kv_down_proj")
"""Parts that TransformerEngine's modules do not replace: experts (slime's grouped product), routers, and the down
projections of latent attention, whose output a rank has to gather (TransformerEngine's linear layers do not).
"""


def _with_transformer_engine(submodules: Any) -> Any:
    """Return a copy of a layer's parts with TransformerEngine's linear layers and attention, in their parts too.

    The parts that a layer consists of stay, and with them the names of its weights, its checkpoints and what engines
    are sent; Megatron's own spec of such layers fuses a norm into the linear layer behind it, which saves nothing in
    16 bit and gives the weights other names. Norms stay: TransformerEngine's took twice the time of ours on an H200.
    """
    from megatron.core.extensions import transformer_engine as te

    replaced: dict[Any, type] = {
        ColumnParallelLinear: te.TEColumnParallelLinear,
        RowParallelLinear: te.TERowParallelLinear,
        VarlenAttention: te.TEDotProductAttention,
    }
    parts = {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)}
    for name, part in parts.items():
        if name in KEPT_FROM_TE:
            continue
        if isinstance(part, type):
            parts[name] = replaced.get(part, part)
        elif isinstance(part, ModuleSpec):
            inner = part.submodules
            inner = _with_transformer_engine(inner) if dataclasses.is_dataclass(inner) else inner
            parts[name] = dataclasses.replace(part, module=replaced.get(part.module, part.module), submodules=inner)
    return type(submodules)(**parts)


def last_layer_spec(config: TransformerConfig, args: Args) -> ModuleSpec:
    """Return the spec of the model's last layer."""
    has_experts = config.num_moe_experts and moe_layer_pattern(config.moe_layer_freq, config.num_layers)[-1]
    return layer_spec(config, args, num_experts=config.num_moe_experts if has_experts else None)


def block_spec(
    config: TransformerConfig, args: Args, vp_stage: int | None = None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the spec of the layers of this rank's pipeline stage, and of the final norm behind the last.

    --spec says where it comes from, else --experimental-attention-variant, else it is `assemble_block`'s.
    """
    path = ".".join(args.spec) if args.spec else OF_VARIANT.get(args.experimental_attention_variant or "")
    if path is None:
        return assemble_block(args, config, vp_stage)
    return cast("TransformerBlockSubmodules | ModuleSpec", load_function(path)(hook_args(args), config, vp_stage))


def assemble_block(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    adapt: Callable[[ModuleSpec, int], None] | None = None,
) -> TransformerBlockSubmodules:
    """Return the block of the flags' layers.

    Args:
        args: derived flags.
        config: of the model.
        vp_stage: which of this rank's interleaved pipeline stages.
        adapt: changes the spec of a layer in place; gets the spec, which no other layer shares, and the number of
            the layer in the whole model, from 0.
    """
    with_experts = [0] * config.num_layers
    if config.num_moe_experts:
        with_experts = moe_layer_pattern(config.moe_layer_freq, config.num_layers)
    first = get_transformer_layer_offset(config, vp_stage)
    layers = []
    for index in range(first, first + get_num_layers_to_build(config, vp_stage)):
        layer = layer_spec(config, args, num_experts=config.num_moe_experts if with_experts[index] else None)
        if adapt is not None:
            adapt(layer, index)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
