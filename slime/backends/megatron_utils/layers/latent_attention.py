"""Multi-latent attention (arXiv:2405.04434) whose gradients are right over tensor-parallel ranks.

Every head sees the same rotated part of the key. Megatron (0.16.1) cuts the projection that makes it over the ranks
and gathers its output with a gradient that keeps what a rank's own heads say, where the sum over all ranks' heads is
needed. It knows nothing else about attention.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttention(MLASelfAttention):
    """Megatron's, with the gradient of the shared part of the keys summed over tensor-parallel ranks.

    The projection's output comes to Megatron as whole rows of this rank's part of the sequence. Then it gathers the
    shared part itself, over the sequence, and the gradient of that is a sum.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.tp_group.size() > 1 and self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_whole_rows)


def _whole_rows(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """[s, b, width / TP] -> [s / TP, b, width]."""
    rows, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(rows)), bias
