"""Sparse attention of DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses for each token.

The indexer scores every key before a token (sum over its heads of weight x ReLU(q k)) and keeps the best
--dsa-indexer-topk; in a sequence that is not longer than that, attention is to all. The choice has no gradient, as in
transformers: an indexer's weights stay as they were loaded, and are frozen. Megatron (0.16.1) has such a layer, but
not for packed sequences, in bfloat16 alone and with fast_hadamard_transform. A layer may also take the choice of an
earlier one (GLM-5.2); it is kept with the pack. Every tensor-parallel rank scores for all of its heads alike. Context
parallelism is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.backends.megatron_utils.model.latent_attention import LatentAttention
from slime.backends.megatron_utils.model.varlen_attention import VarlenAttention
from slime.utils import accelerator

SCORES_AT_A_TIME = 2**26
"""Numbers that the indexer has in memory before they are summed over its heads."""
_CHOSEN = "_slime_chosen_keys"


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
        padded = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
        ends = cu_seqlens.tolist()
        spans = [(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True) if end > start]
        if max(end - start for start, end in spans) <= self.topk:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        kept: dict[int, list[torch.Tensor | None]] = vars(packed_seq_params).setdefault(_CHOSEN, {})
        if self.indexer is not None:
            kept[self.plan.chooser] = self._choose(self.indexer, x, qr, spans)
        outs = []
        for (start, end), chosen in zip(spans, kept[self.plan.chooser], strict=True):
            q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
            mask = None if chosen is None else _mask(chosen)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
            )
            outs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outs)

    @torch.no_grad()
    def _choose(
        self, indexer: Indexer, x: torch.Tensor, qr: torch.Tensor, spans: list[tuple[int, int]]
    ) -> list[torch.Tensor | None]:
        """For each sequence [tokens, topk] numbers of its tokens; None where all fit."""
        x, qr = x.reshape(-1, x.shape[-1]), qr.reshape(-1, qr.shape[-1])
        if self.config.sequence_parallel:
            x, qr = (gather_from_sequence_parallel_region(part, group=self.tp_group) for part in (x, qr))
        return [
            indexer(x[start:end], qr[start:end], self.topk) if end - start > self.topk else None
            for start, end in spans
        ]


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

    def forward(self, x: torch.Tensor, qr: torch.Tensor, topk: int) -> torch.Tensor:
        """x [n, H] and qr [n, rank] of one sequence -> [n, topk] numbers of keys; behind a token there may be some."""
        cos, sin = self._cos_sin(x.shape[0])
        q = self._rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), cos, sin)
        k = self._rotate(self.k_norm(self.wk(x)).unsqueeze(1), cos, sin).squeeze(1)
        weights = self.weights_proj(x).float() * self.heads**-0.5
        keys, found = k.float().transpose(0, 1), []
        rows = max(1, SCORES_AT_A_TIME // (self.heads * x.shape[0]))
        for first in range(0, x.shape[0], rows):
            scores = F.relu(torch.matmul(q[first : first + rows].float(), keys) * self.head_dim**-0.5)
            summed = torch.matmul(weights[first : first + rows].unsqueeze(1), scores).squeeze(1)
            before = torch.ones_like(summed, dtype=torch.bool).tril(first)
            found.append(summed.masked_fill(~before, float("-inf")).topk(topk, dim=-1).indices)
        return torch.cat(found)

    def _cos_sin(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.rotary[0](length, packed_seq=True)
        freqs, scale = table if isinstance(table, tuple) else (table, 1.0)
        freqs = freqs[:length].view(length, 1, -1)
        if self.is_interleaved:  # the table has each frequency twice, one half after the other
            freqs = freqs[..., : freqs.shape[-1] // 2].repeat_interleave(2, -1)
        return freqs.cos() * scale, freqs.sin() * scale

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [n, heads, channels], of which the first are rotated."""
        cos, sin, turned, rest = cos.to(x.dtype), sin.to(x.dtype), x[..., : self.rotated], x[..., self.rotated :]
        if self.is_interleaved:
            across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            across = torch.cat((-second, first), -1)
        return torch.cat((turned * cos + across * sin, rest), -1)


def _mask(chosen: torch.Tensor) -> torch.Tensor:
    """[n, topk] numbers of keys -> [n, n], True where a token attends."""
    length = chosen.shape[0]
    allowed = torch.zeros(length, length, dtype=torch.bool, device=chosen.device).scatter(1, chosen, True)
    return allowed.tril()
