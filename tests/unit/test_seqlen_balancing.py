"""Balanced partitions: complete, even, deterministic."""

from __future__ import annotations

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.dp_schedule import get_seqlen_balanced_partitions


def test_the_textbook_instance_of_largest_differencing():
    # 8 - 7 = 1, 6 - 5 = 1, then 4 joins: the differences cancel down to 2
    partitions = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in partitions)
    assert sums == [14, 16]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_every_index_appears_once_and_no_partition_is_empty(weights, k, equal_size):
    if k > len(weights) or (equal_size and len(weights) % k):
        with pytest.raises(ValueError, match="cannot split"):
            get_seqlen_balanced_partitions(weights, k, equal_size)
        return
    partitions = get_seqlen_balanced_partitions(weights, k, equal_size)
    assert sorted(i for part in partitions for i in part) == list(range(len(weights)))
    assert len(partitions) == k
    assert all(partitions)
    if equal_size:
        assert {len(part) for part in partitions} == {len(weights) // k}
    assert partitions == get_seqlen_balanced_partitions(weights, k, equal_size)


def test_equal_sizes_are_balanced_better_than_dealing_in_order():
    weights = [100, 90, 80, 70, 4, 3, 2, 1]
    sums = [sum(weights[i] for i in part) for part in get_seqlen_balanced_partitions(weights, 2, equal_size=True)]
    assert abs(sums[0] - sums[1]) < abs(sum(weights[0::2]) - sum(weights[1::2]))


def textbook(weights, k, width):
    """Largest differencing with all k groups of every state written out: n states of k groups."""
    items = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    rows = [items[start : start + width] for start in range(0, len(items), width)]
    states = [[(weights[i], [i]) for i in row] + [(0, [])] * (k - width) for row in rows]
    order = count()
    heap = [_entry(state, next(order)) for state in states]
    while len(heap) > 1:
        a, b = heapq.nsmallest(2, heap, key=lambda entry: entry[:2])
        heap = [entry for entry in heap if entry[1] not in (a[1], b[1])]
        pairs = zip(a[2], reversed(b[2]), strict=True)
        heap.append(_entry([(x + y, left + right) for (x, left), (y, right) in pairs], next(order)))
    return sorted(sorted(members) for _, members in heap[0][2])


def _entry(groups, order):
    groups = sorted(groups, key=lambda group: (-group[0], group[1]))
    return groups[-1][0] - groups[0][0], order, groups


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 8), st.booleans())
def test_states_without_their_empty_groups_give_the_split_of_the_textbook(weights, k, equal_size):
    k = min(k, len(weights))
    weights = weights[: len(weights) // k * k] if equal_size else weights
    expected = textbook(weights, k, k if equal_size else 1)
    assert get_seqlen_balanced_partitions(weights, k, equal_size) == expected
