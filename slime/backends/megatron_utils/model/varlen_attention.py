"""Causal attention over packed sequences: Megatron's core attention without TransformerEngine.

On CUDA in 16 bit it is one call of torch's varlen kernel. Elsewhere sequences of equal length are stacked, so that a
pack of 128 short sequences takes a few scaled_dot_product_attention calls instead of 128. It knows nothing about
context parallelism (not supported) and has no dropout.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class VarlenAttention(MegatronModule):
    """softmax(q k^T * scale) v within each sequence of a pack, grouped-query heads included.

    Shapes (t packed tokens, h query heads and g key/value heads of this rank, d channels): packed q [t, h, d], k and v
    [t, g, d] -> [t, h * d]; without `packed_seq_params` q [s, b, h, d], k and v [s, b, g, d] -> [s, b, h * d], that is
    b sequences of s tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        if config.attention_dropout:
            raise ValueError(f"--attention-dropout {config.attention_dropout}: our attention has no dropout; use 0.")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.backend = config.attention_backend

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend; `attention_mask` is ignored: the mask is causal within each sequence."""
        if packed_seq_params is None:
            return self._attend_batch(query, key, value)
        padded = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
        if self._use_kernel(query):
            longest = int(packed_seq_params.max_seqlen_q)
            out = _varlen_kernel(query, key, value, cu_seqlens.int(), longest, scale=self.softmax_scale)
        else:
            out = attend_packed(query, key, value, cu_seqlens.tolist(), scale=self.softmax_scale)
        return out.reshape(query.shape[0], -1)

    def _use_kernel(self, query: torch.Tensor) -> bool:
        can = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        if self.backend == AttnBackend.flash and not can:
            raise ValueError(f"--attention-backend flash needs CUDA and 16 bit, not {query.dtype} on {query.device}.")
        return can and self.backend != AttnBackend.unfused

    def _attend_batch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seq_length, batch = query.shape[:2]
        out = _sdpa(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).reshape(seq_length, batch, -1)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int], *, scale: float
) -> torch.Tensor:
    """Causal attention within each sequence of a pack.

    Args:
        query: [t, h, d].
        key: [t, g, d], h a multiple of g.
        value: [t, g, d].
        cu_seqlens: where sequences start, and t at the end.
        scale: of the scores.

    Returns:
        [t, h, d].
    """
    groups: dict[int, list[int]] = {}  # length -> starts
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        if end > start:
            groups.setdefault(end - start, []).append(start)
    if len(groups) == 1:  # nothing to gather: the pack is already a batch
        length, starts = next(iter(groups.items()))
        shape = (len(starts), length)
        out = _sdpa(*(x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value)), scale=scale)
        return out.transpose(1, 2).flatten(0, 1)
    rows, outs = [], []
    for length, starts in groups.items():
        if len(starts) == 1:
            part = slice(starts[0], starts[0] + length)
            row = torch.arange(starts[0], starts[0] + length)
            q, k, v = (x[part].unsqueeze(0).transpose(1, 2) for x in (query, key, value))
        else:
            row = (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()
            where = row.to(query.device)
            q, k, v = (
                x.index_select(0, where).unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value)
            )
        rows.append(row)
        outs.append(_sdpa(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    # index_copy and index_select have gradients without a scatter of duplicates, which is slow on the CPU.
    return torch.zeros_like(query).index_copy(0, torch.cat(rows).to(query.device), torch.cat(outs))


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """[n, h, s, d] and [n, g, s, d] -> [n, h, s, d]."""
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)


def _varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    *,
    scale: float,
) -> torch.Tensor:
    """torch's flash attention over a pack; same shapes as `attend_packed`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # no limit to the left, nothing to the right
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 groups heads without being told
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
