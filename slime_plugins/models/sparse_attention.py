"""Sparse attention of DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses for each token.

The indexer scores every key before a token (sum over its heads of weight x ReLU(q k)) and keeps the best
--dsa-indexer-topk; in a sequence that is not longer than that, attention is to all. The choice has no gradient, as in
transformers: an indexer's weights stay as they were loaded, and are frozen. Megatron (0.16.1) has such a layer, but
not for packed sequences, in bfloat16 alone and with fast_hadamard_transform. A layer may also take the choice of an
earlier one (GLM-5.2); it is kept with the pack. Every tensor-parallel rank scores for all of its heads alike. Under
context parallelism the keys of all ranks are gathered, those of indexers too, and a rank chooses for its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.backends.megatron_utils.cp_utils import KeyChunks, zigzag_positions
from slime.backends.megatron_utils.layers.varlen_attention import (
    LatentAttention,
    VarlenAttention,
    cu_seqlens_of,
    gather_keys,
    host_ends,
    keep,
    key_chunks_of,
    longest_run,
)
from slime.utils import accelerator

SCORES_AT_A_TIME = 2**26
"""Numbers that the indexer has in memory before they are summed over its heads."""
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class IndexerPlan:
    """What no flag says about the indexer of a layer.

    Attributes:
        chooser: number (from 1) of the layer whose indexer chooses the keys; the layer's own for most.
        is_interleaved: rotate channels 2i and 2i + 1 of a head together, not i and i + half.
    """

    chooser: int
    is_interleaved: bool = False


class SparseLatentAttention(LatentAttention):
    """Latent attention whose core gets the positions' table, which Megatron makes here alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.core_attention.indexer is not None:
            self.core_attention.indexer.rotary = (self.rotary_pos_emb,)  # a tuple: not a second owner of the module


class SparseAttention(VarlenAttention):
    """softmax(q k^T * scale) v over the chosen keys of each token; shapes as in VarlenAttention."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, *args: Any, plan: IndexerPlan, **options: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.plan, self.topk = plan, config.dsa_indexer_topk
        self.tp_group = options["pg_collection"].tp
        self.indexer = Indexer(config, plan) if plan.chooser == layer_number else None

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        x: torch.Tensor,
        qr: torch.Tensor,
        attn_mask_type: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend; `x` [s / TP, b, H] is the layer's input, `qr` [s / TP, (b,) rank] the compressed queries."""
        if packed_seq_params is None:
            raise ValueError("sparse attention runs over packed sequences: give packed_seq_params.")
        ends = host_ends(packed_seq_params)
        if longest_run(ends) <= self.topk:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        chunks = None
        if self.cp_group is not None:
            chunks = key_chunks_of(packed_seq_params, self.cp_group)
            key, value = gather_keys(key, value, chunks, self.cp_group)
        spans = _spans(ends, chunks)
        kept: dict[int, list[torch.Tensor | None]] = keep(packed_seq_params, "chosen_keys", dict)
        if self.indexer is not None:
            kept[self.plan.chooser] = self._choose(self.indexer, x, qr, packed_seq_params, chunks, spans)
        outs = []
        for (queries, keys), chosen in zip(spans, kept[self.plan.chooser], strict=True):
            q, k, v = (part.transpose(0, 1) for part in (query[queries], key[keys], value[keys]))
            mask = _mask(chosen, q.shape[1], k.shape[1], q.device)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
            )
            outs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outs)

    @torch.no_grad()
    def _choose(
        self,
        indexer: Indexer,
        x: torch.Tensor,
        qr: torch.Tensor,
        packed_seq_params: Any,
        chunks: KeyChunks | None,
        spans: list[_Span],
    ) -> list[torch.Tensor | None]:
        """For each span [its queries, topk] numbers of its keys; None where all fit."""
        x, qr = x.reshape(-1, x.shape[-1]), qr.reshape(-1, qr.shape[-1])
        if self.config.sequence_parallel:
            x, qr = (gather_from_sequence_parallel_region(part, group=self.tp_group) for part in (x, qr))
        rank, size = (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
        cu_seqlens = cu_seqlens_of(packed_seq_params)
        positions = zigzag_positions(cu_seqlens, x.shape[0], cp_rank=rank, cp_size=size)
        rotation = indexer.rotation(longest_run(host_ends(packed_seq_params)), positions)
        q, k, weights = indexer.queries(qr, rotation), indexer.keys(x, rotation), indexer.weights(x)
        if chunks is not None:
            k = gather_from_sequence_parallel_region(k, group=self.cp_group).index_select(0, chunks.rows)
        return [
            best_keys(q[queries], k[keys], weights[queries], self.topk) if keys.stop - keys.start > self.topk else None
            for queries, keys in spans
        ]


class _Span(NamedTuple):
    """Rows of consecutive queries of a sequence, and of all the keys up to the last of them."""

    queries: slice
    keys: slice


def _spans(ends: list[int], chunks: KeyChunks | None) -> list[_Span]:
    """Whole sequences, or a context-parallel rank's chunks of them."""
    cu_queries, cu_keys = (ends, ends) if chunks is None else (chunks.cu_queries, chunks.cu_keys)
    spans = [_Span(slice(*q), slice(*k)) for q, k in zip(pairwise(cu_queries), pairwise(cu_keys), strict=True)]
    return [span for span in spans if span.queries.stop > span.queries.start]


class Indexer(torch.nn.Module):
    """Scores keys for tokens; every tensor-parallel rank has all of it, and it is frozen."""

    def __init__(self, config: MLATransformerConfig, plan: IndexerPlan) -> None:
        super().__init__()
        self.heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotated, self.is_interleaved = config.qk_pos_emb_head_dim, plan.is_interleaved
        self.rotary: tuple[Any, ...] = ()
        where = {"dtype": config.params_dtype, "device": accelerator.current_device()}
        self.wq_b = torch.nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False, **where)
        self.wk = torch.nn.Linear(config.hidden_size, self.head_dim, bias=False, **where)
        self.k_norm = torch.nn.LayerNorm(self.head_dim, eps=1e-6, **where)
        self.weights_proj = torch.nn.Linear(config.hidden_size, self.heads, bias=False, **where)
        if config.perform_initialization:  # alike on all ranks
            generator = torch.Generator().manual_seed(plan.chooser)
            for layer in (self.wq_b, self.wk, self.weights_proj):
                values = torch.randn(layer.weight.shape, generator=generator) * config.init_method_std
                layer.weight.data.copy_(values)
        self.requires_grad_(False)

    def rotation(self, longest: int, positions: torch.Tensor) -> Rotation:
        """cos and sin [n, 1, channels] of tokens at `positions` [n] of sequences that are at most `longest` long."""
        table = self.rotary[0](longest, packed_seq=True)
        freqs, scale = table if isinstance(table, tuple) else (table, 1.0)
        freqs = freqs[:longest].view(longest, 1, -1).index_select(0, positions)
        if self.is_interleaved:  # the table has each frequency twice, one half after the other
            freqs = freqs[..., : freqs.shape[-1] // 2].repeat_interleave(2, -1)
        return freqs.cos() * scale, freqs.sin() * scale

    def queries(self, qr: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """qr [n, rank] -> [n, heads, channels]."""
        return self._rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), *rotation)

    def keys(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [n, H] -> [n, channels]."""
        return self._rotate(self.k_norm(self.wk(x)).unsqueeze(1), *rotation).squeeze(1)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, H] -> [n, heads] in fp32: by how much each head's score counts."""
        found: torch.Tensor = self.weights_proj(x).float() * self.heads**-0.5
        return found

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [n, heads, channels], of which the first are rotated."""
        cos, sin, turned, rest = cos.to(x.dtype), sin.to(x.dtype), x[..., : self.rotated], x[..., self.rotated :]
        if self.is_interleaved:
            across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            across = torch.cat((-second, first), -1)
        return torch.cat((turned * cos + across * sin, rest), -1)


def best_keys(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int) -> torch.Tensor:
    """The keys with the best scores, of those that a query sees.

    Args:
        q: [n, heads, channels] of the last n tokens of a sequence so far.
        k: [m, channels] of all of its m tokens so far.
        weights: [n, heads].
        topk: how many.

    Returns:
        [n, topk] numbers of keys; where a query sees fewer, there are some behind it.
    """
    keys, found, seen = k.float().transpose(0, 1), [], k.shape[0] - q.shape[0]
    rows = max(1, SCORES_AT_A_TIME // (q.shape[1] * k.shape[0]))
    for first in range(0, q.shape[0], rows):
        scores = F.relu(torch.matmul(q[first : first + rows].float(), keys) * q.shape[-1] ** -0.5)
        summed = torch.matmul(weights[first : first + rows].unsqueeze(1), scores).squeeze(1)
        before = torch.ones_like(summed, dtype=torch.bool).tril(seen + first)
        found.append(summed.masked_fill(~before, float("-inf")).topk(topk, dim=-1).indices)
    return torch.cat(found)


def _mask(chosen: torch.Tensor | None, n: int, m: int, device: torch.device) -> torch.Tensor | None:
    """[n, topk] numbers of m keys -> [n, m], True where a query attends; None: all of it is causal, of n = m."""
    if chosen is None:
        return None if n == m else torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)
    return torch.zeros(n, m, dtype=torch.bool, device=device).scatter(1, chosen, True).tril(m - n)
