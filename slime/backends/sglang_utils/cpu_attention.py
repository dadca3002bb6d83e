"""SGLang's pure-torch attention, over all sequences of a batch at once instead of one after the other.

SGLang's "torch_native" backend runs one attention call a sequence and layer; with hundreds of short sequences these
small calls are half of a step. `install()` registers a subclass under the same name that pads sequences of similar
length to one tensor. What it does not cover (cross attention, sliding windows, an encoder, another cache dtype) and
sequences without company go the old way. It knows nothing about models, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "torch_native"
MAX_SCORES = 2**24  # elements of a padded score matrix (per head): 64 MiB of mask and scores at most
SHORTEST_BUCKET = 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to one tensor.

    Attributes:
        rows: `[B]` indices of the sequences in the batch.
        queries: `[B, Q]` indices of their query tokens; a padded place repeats the first.
        is_query: `[B, Q]` False where padded; None when nothing is.
        keys: `[B, K]` places of their tokens in the cache; a padded place repeats the first.
        mask: `[B, 1, Q, K]` True where a query may look; None when every query may look everywhere.
    """

    rows: torch.Tensor
    queries: torch.Tensor
    is_query: torch.Tensor | None
    keys: torch.Tensor
    mask: torch.Tensor | None


def plan(
    seq_lens: torch.Tensor, query_lens: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
) -> list[Bucket]:
    """Put the sequences of a batch into buckets whose lengths differ by less than a factor of two.

    Args:
        seq_lens: `[N]` tokens of each sequence, the query tokens included, which are its last.
        query_lens: `[N]` query tokens of each.
        req_to_token: `[requests, context]` place in the cache of each token of each request.
        req_pool_indices: `[N]` row of each sequence in `req_to_token`.
    """
    starts = torch.cumsum(query_lens, 0) - query_lens
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (num_keys, num_queries) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        groups.setdefault((_bucket(num_keys), _bucket(num_queries)), []).append(row)
    buckets = []
    for (longest, most_queries), members in groups.items():
        at_once = max(1, MAX_SCORES // (longest * most_queries))
        for first in range(0, len(members), at_once):
            rows = torch.tensor(members[first : first + at_once])
            buckets.append(_pad(rows, starts, seq_lens, query_lens, req_to_token[req_pool_indices[rows]]))
    return buckets


def _bucket(length: int) -> int:
    return 1 if length == 1 else max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())


def _pad(
    rows: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    places: torch.Tensor,
) -> Bucket:
    num_keys, num_queries = seq_lens[rows, None], query_lens[rows, None]
    query, key = torch.arange(int(num_queries.max()))[None], torch.arange(int(num_keys.max()))[None]
    is_query, is_key = query < num_queries, key < num_keys
    last_visible = num_keys - num_queries + query  # causal: a query sees itself and what came before
    mask = (key[:, None, :] <= last_visible[:, :, None]) & is_key[:, None, :]
    return Bucket(
        rows=rows,
        queries=starts[rows, None] + torch.where(is_query, query, 0),
        is_query=None if bool(is_query.all()) else is_query,
        keys=torch.where(is_key, places[:, : key.shape[1]], places[:, :1]).long(),
        mask=None if bool(mask.all()) else mask[:, None],
    )


def attend(
    buckets: list[Bucket],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scaling: float | None,
) -> None:
    """Causal attention of every bucket.

    Args:
        buckets: of `plan`.
        query: `[T, heads, D]` query tokens, sequence after sequence.
        output: `[T, heads, D_v]`, written.
        k_cache: `[places, kv_heads, D]`.
        v_cache: `[places, kv_heads, D_v]`.
        scaling: of the scores; None is 1 / sqrt(D).
    """
    for bucket in buckets:
        out = scaled_dot_product_attention(
            query[bucket.queries].transpose(1, 2),
            k_cache[bucket.keys].transpose(1, 2),
            v_cache[bucket.keys].transpose(1, 2),
            attn_mask=bucket.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        ).transpose(1, 2)
        if bucket.is_query is None:
            output[bucket.queries] = out
        else:
            output[bucket.queries[bucket.is_query]] = out[bucket.is_query]


def install() -> None:
    """Register the batched backend in the place of SGLang's; call it before the server starts."""
    from sglang.srt.layers.attention import attention_registry

    attention_registry.ATTENTION_BACKENDS[BACKEND] = _factory()


def _factory() -> Callable[[Any], Any]:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        """SGLang's backend with its two loops over sequences replaced."""

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self._buckets: list[Bucket] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._buckets = None  # made by the first layer, used by all

        def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Any:
            return self._run(super()._run_sdpa_forward_decode, args, kwargs)

        def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs["causal"]:
                return super()._run_sdpa_forward_extend(*args, **kwargs)
            return self._run(super()._run_sdpa_forward_extend, args, kwargs)

        def _run(self, one_by_one: Callable[..., Any], operands: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest = operands
            *extend, encoder_lens = rest
            special = encoder_lens is not None or kwargs["is_cross_attn"] or kwargs["sliding_window_size"] is not None
            if special or len(seq_lens) == 1 or not query.dtype == k_cache.dtype == v_cache.dtype:
                return one_by_one(*operands, **kwargs)
            if self._buckets is None:
                query_lens = extend[1] if extend else torch.ones_like(seq_lens)
                self._buckets = plan(seq_lens, query_lens, req_to_token, req_pool_indices)
            attend(self._buckets, query, output, k_cache, v_cache, scaling=kwargs["scaling"])
            return output

    return BatchedAttention
