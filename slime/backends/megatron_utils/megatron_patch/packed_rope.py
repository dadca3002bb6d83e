"""Rotary embedding of packed (THD) sequences in one indexing step.

Upstream (0.16.1): the unfused path walks the sequences in Python, for queries and keys of every layer, and takes cos
and sin of every token again; a pack of 128 short sequences spends more time there than in its matmuls. It also
decides by `max_seqlen == total tokens` whether the table holds positions of the whole pack, which is wrong for
several sequences with a generous max_seqlen. Values are bitwise the same as its own. It can go when
TransformerEngine's fused kernel is used. Multi-latent attention keeps upstream's path.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import zigzag_positions


def apply() -> None:
    """Replace Megatron's packed rotary embedding."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    upstream = rope_utils._apply_rotary_pos_emb_thd
    if upstream.__module__ == __name__:
        return

    def rotate_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> torch.Tensor:
        """t [T, heads, dim], freqs [max_seqlen, 1, 1, rotary dim] -> [T, heads, dim]."""
        if cp_group is None or multi_latent_attention:
            return upstream(
                t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale=mscale, cp_group=cp_group
            )
        positions = zigzag_positions(cu_seqlens, t.size(0), cp_rank=cp_group.rank(), cp_size=cp_group.size())
        cos = (torch.cos(freqs) * mscale).to(t.dtype)[positions].squeeze(1)
        sin = (torch.sin(freqs) * mscale).to(t.dtype)[positions].squeeze(1)
        rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
        half = rope_utils._rotate_half(rotated.unsqueeze(1), rotary_interleaved).squeeze(1)
        rotated = (rotated * cos) + (half * sin)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
