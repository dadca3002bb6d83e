"""Attention over padded buckets equals attention one sequence at a time, written out from its definition."""

from __future__ import annotations

import math

import pytest
import torch

from slime.backends.sglang_utils import cpu_standins

HEADS, DIM = 4, 8


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """softmax(q k^T scaling) v of one sequence whose queries `[Q, heads, D]` are its last tokens."""
    num_queries, num_keys = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    out = torch.empty(num_queries, query.shape[1], values.shape[2])
    for position in range(num_queries):
        visible = num_keys - num_queries + position + 1
        for head in range(query.shape[1]):
            scores = keys[:visible, head // group] @ query[position, head] * scaling
            out[position, head] = scores.softmax(0) @ values[:visible, head // group]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([5, 1, 40, 17, 6], [1, 1, 1, 1, 1]),  # decode, several buckets
        ([7, 7, 7], [1, 1, 1]),  # nothing to pad
        ([8, 20, 3, 33, 9], [8, 4, 3, 33, 1]),  # prefill with and without a cached prefix, and a decode among them
        ([2, 2], [2, 2]),
    ],
)
def test_every_sequence_is_attended_to_as_if_it_were_alone(
    seq_lens: list[int], query_lens: list[int], kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(200, generator=generator)
    k_cache, v_cache = (torch.randn(200, kv_heads, DIM, generator=generator) for _ in range(2))
    query = torch.randn(sum(query_lens), HEADS, DIM, generator=generator)
    req_to_token = torch.zeros(10, 64, dtype=torch.int32)
    req_pool_indices = torch.tensor([7, 2, 9, 0, 4][: len(seq_lens)])
    taken = 0
    for row, length in zip(req_pool_indices.tolist(), seq_lens, strict=True):
        req_to_token[row, :length] = places[taken : taken + length]
        taken += length
    output = torch.full((sum(query_lens), HEADS, DIM), math.nan)
    buckets = cpu_standins.plan(torch.tensor(seq_lens), torch.tensor(query_lens), req_to_token, req_pool_indices)
    cpu_standins.attend(buckets, query, output, k_cache, v_cache, scaling=0.3)
    start = 0
    for row, length, num_queries in zip(req_pool_indices.tolist(), seq_lens, query_lens, strict=True):
        own = req_to_token[row, :length].long()
        expected = by_definition(query[start : start + num_queries], k_cache[own], v_cache[own], 0.3)
        torch.testing.assert_close(output[start : start + num_queries], expected, atol=2e-6, rtol=1e-5)
        start += num_queries


def test_a_large_group_is_cut_into_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_standins, "MAX_SCORES", 3 * 16 * 16)
    lengths = torch.full((8,), 10)
    buckets = cpu_standins.plan(lengths, lengths, torch.zeros(8, 16, dtype=torch.int32), torch.arange(8))
    assert [len(bucket.rows) for bucket in buckets] == [3, 3, 2]


def test_lengths_of_one_bucket_differ_by_less_than_a_factor_of_two() -> None:
    lengths = torch.tensor([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 500])
    buckets = cpu_standins.plan(
        lengths, torch.ones_like(lengths), torch.zeros(11, 512, dtype=torch.int32), torch.arange(11)
    )
    for bucket in buckets:
        longest, shortest = lengths[bucket.rows].max(), lengths[bucket.rows].min()
        assert longest < 2 * shortest or longest <= cpu_standins.SHORTEST_BUCKET
