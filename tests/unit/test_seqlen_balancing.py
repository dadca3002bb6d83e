"""Balanced partitions: complete, even, deterministic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.seqlen_balancing import get_seqlen_balanced_partitions


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
