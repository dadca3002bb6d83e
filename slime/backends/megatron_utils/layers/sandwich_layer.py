"""A transformer layer with norms after attention and after the MLP, before each is added to the residual (GLM-4).

Megatron's layer has none there. Everything else of the layer is Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


@dataclass
class SandwichSubmodules(TransformerLayerSubmodules):
    """Megatron's submodules and the two norms; IdentityOp leaves a norm out."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class SandwichLayer(TransformerLayer):
    """x + post_self_attn_layernorm(attention(norm(x))), then the same around the MLP; [s, b, h] -> [s, b, h]."""

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
