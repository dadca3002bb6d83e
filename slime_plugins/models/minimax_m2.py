"""MiniMax-M2: queries and keys are normed over all heads of a token together, not head by head.

Everything else of the model is Megatron's own and slime's (slime.backends.megatron_utils.model.spec). A rank of
tensor parallelism has some of the heads: the mean of the squares is taken over all ranks.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.utils import accelerator


def get_minimax_m2_spec(
    args: Args, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage."""

    def adapt(layer: ModuleSpec, _: int) -> None:
        parts = layer.submodules.self_attention.submodules
        parts.q_layernorm = ModuleSpec(module=AllHeadsNorm, params={"heads": config.num_attention_heads})
        parts.k_layernorm = ModuleSpec(module=AllHeadsNorm, params={"heads": config.num_query_groups})

    return assemble_block(args, config, vp_stage, adapt)


get_minimax_m2_layer_spec = get_minimax_m2_spec
"""Another name of it, which command lines of others use."""


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over the channels of all heads: [..., heads of this rank, channels] -> the same shape.

    Every rank holds the whole weight and uses its heads' part. Megatron adds up the gradients of what is called
    q_layernorm and k_layernorm over tensor-parallel ranks, which makes the whole gradient of the parts.

    Args:
        config: of the model.
        hidden_size: channels of a head.
        eps: added to the mean of the squares.
        heads: of all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.channels = eps, heads * hidden_size
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        ones = torch.ones(self.channels, dtype=config.params_dtype, device=accelerator.current_device())
        self.weight = torch.nn.Parameter(ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm in fp32, then scale, as transformers."""
        wide = x.flatten(-2).float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        ranks, weight = self.tp_group.size(), self.weight
        if ranks > 1:  # each rank's output depends on the sum, and the sum on each rank's input
            squares = reduce_from_tensor_model_parallel_region(squares, self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, self.tp_group)
            weight = weight.chunk(ranks)[self.tp_group.rank()]
        normed = wide * torch.rsqrt(squares / self.channels + self.eps)
        return (weight * normed.to(x.dtype)).view(x.shape)
