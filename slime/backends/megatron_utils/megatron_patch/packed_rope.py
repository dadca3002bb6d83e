"""Rotary embedding of packed (THD) sequences in one indexing step.

Upstream (0.16.1): the unfused path reads the sequences' lengths from the GPU, walks over them in Python, for queries
and keys of every layer, and takes cos and sin of every token again; a pack of 128 short sequences spends more time
there than in its matmuls. It also decides by `max_seqlen == total tokens` whether the table holds positions of the
whole pack, which is wrong for several sequences with a generous max_seqlen. Off CUDA values are bitwise the same
as its own. It can go when TransformerEngine's fused kernel is used.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import zigzag_positions
from slime.utils.accelerator.fusion import kernel_on_cuda

_last: tuple[Any, ...] = ()
"""What cosines and sines were last asked for, and they. In most models every layer asks for the same; with latent
attention the two of a layer do, and to keep them for each layer would take memory."""


def rotate_packs_at_once() -> None:
    """Replace Megatron's packed rotary embedding."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    def rotate_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> torch.Tensor:
        """t [T, heads, dim], freqs [max_seqlen, 1, 1, rotary dim] or each token's [T, 1, rotary dim] -> as t."""
        if cp_group is None:
            raise ValueError("the rotation of a pack needs the context-parallel group.")
        cos, sin = _cos_sin(freqs, cu_seqlens, t, mscale=mscale, cp_group=cp_group)
        dim = freqs.shape[-1]
        rotated = t if dim == t.shape[-1] else t[..., :dim]
        if multi_latent_attention and rotary_interleaved:
            rotated = _halves(rotated)
        # the weights of latent attention have the two parts of a channel side by side
        are_paired = rotary_interleaved or multi_latent_attention
        rotated = rotate(rotated, cos, sin, are_paired, rotary_interleaved)
        return rotated if dim == t.shape[-1] else torch.cat((rotated, t[..., dim:]), dim=-1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


def _cos_sin(
    freqs: torch.Tensor, cu_seqlens: torch.Tensor, t: torch.Tensor, *, mscale: float, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every token [T, 1, rotary dim]."""
    global _last
    key = (t.size(0), mscale, t.dtype)
    last = _last  # of one moment: checkpoints compute again in another thread
    if not (last and last[0] is freqs and last[1] is cu_seqlens and last[2] == key):
        cos, sin = ((f(freqs) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
        if freqs.dim() == 4:
            positions = zigzag_positions(cu_seqlens, t.size(0), cp_rank=cp_group.rank(), cp_size=cp_group.size())
            cos, sin = (x[positions].squeeze(1) for x in (cos, sin))
        last = _last = (freqs, cu_seqlens, key, cos, sin)
    return last[3], last[4]


@kernel_on_cuda("slime.backends.megatron_utils.kernels.small.rotate")
def rotate(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, are_read_paired: bool, are_written_paired: bool
) -> torch.Tensor:
    if are_read_paired and not are_written_paired:
        t = _halves(t)
    if are_written_paired:
        even, odd = t[..., ::2], t[..., 1::2]
        turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = t.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (t * cos) + (turned * sin)


def _halves(t: torch.Tensor) -> torch.Tensor:
    """[..., dim]: the even channels, then the odd ones."""
    return torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)
