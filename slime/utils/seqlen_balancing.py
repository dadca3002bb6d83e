"""Split weighted items into k groups of nearly equal weight (Karmarkar-Karp, the largest differencing method).

Pure arithmetic over a list of numbers: it does not know what an item is (a sample, a micro-batch) nor what its weight
measures (tokens,
FLOPs). Ties are broken by position, so the same input always gives the same split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split the indices of `seqlen_list` into `k_partitions` lists with weights as equal as the method makes them.

    Args:
        seqlen_list: weight of each item.
        k_partitions: number of lists, at least 1 and at most the number of items.
        equal_size: every list gets the same number of items, which must then be a multiple of `k_partitions`.

    Returns:
        `k_partitions` lists of ascending indices that together hold every index once, ordered by their first index.

    Raises:
        ValueError: the items cannot be split so.
    """
    num_items = len(seqlen_list)
    if not 1 <= k_partitions <= num_items:
        raise ValueError(f"cannot split {num_items} items into {k_partitions} non-empty partitions")
    if equal_size and num_items % k_partitions:
        raise ValueError(f"cannot split {num_items} items into {k_partitions} partitions of equal size")
    items = sorted(range(num_items), key=lambda i: (seqlen_list[i], i))
    width = k_partitions if equal_size else 1
    states = [_State(items[start : start + width], seqlen_list, k_partitions) for start in range(0, num_items, width)]
    heap = [(-state.spread(), order, state) for order, state in enumerate(states)]
    heapq.heapify(heap)
    order = len(states)
    while len(heap) > 1:
        merged = heapq.heappop(heap)[2].merge(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-merged.spread(), order, merged))
        order += 1
    return sorted(heap[0][2].partitions())


class _Group(NamedTuple):
    weight: float
    first: int
    """The item that names the group; of two groups of one weight the one with the smaller name counts as heavier."""
    members: Any
    """An item, or a pair of members."""


class _State:
    """k groups, of which the empty ones are not stored: n states would otherwise take n x k."""

    def __init__(self, items: list[int], weights: Sequence[float], k: int) -> None:
        self._k = k
        self._groups: dict[int, _Group] = {}
        # A group that was taken out stays in the two heaps until it comes to the top.
        self._heaviest: list[tuple[float, int]] = []
        self._lightest: list[tuple[float, int]] = []
        for item in items:
            self._put(_Group(weights[item], item, item))

    def spread(self) -> float:
        """Weight of the heaviest group minus that of the lightest."""
        while not self._holds(-self._heaviest[0][0], self._heaviest[0][1]):
            heapq.heappop(self._heaviest)
        lightest = 0 if len(self._groups) < self._k else self._find_lightest().weight
        return -self._heaviest[0][0] - lightest

    def merge(self, other: _State) -> _State:
        """The heaviest group of one joins the lightest of the other; the state of fewer groups is taken apart."""
        is_larger = len(self._groups) >= len(other._groups)
        large, small = (self, other) if is_larger else (other, self)
        num_empty = self._k - len(large._groups)
        joined = []
        for number, group in enumerate(sorted(small._groups.values(), key=lambda g: (-g.weight, g.first))):
            if number >= num_empty:
                lightest = large._find_lightest()
                del large._groups[lightest.first]
                a, b = (lightest, group) if is_larger else (group, lightest)
                group = _Group(a.weight + b.weight, a.first, (a.members, b.members))
            joined.append(group)
        for group in joined:
            large._put(group)
        return large

    def partitions(self) -> list[list[int]]:
        """The items of each group, in rising order."""
        return [sorted(_items(group.members)) for group in self._groups.values()]

    def _put(self, group: _Group) -> None:
        self._groups[group.first] = group
        heapq.heappush(self._heaviest, (-group.weight, group.first))
        heapq.heappush(self._lightest, (group.weight, -group.first))

    def _holds(self, weight: float, first: int) -> bool:
        return first in self._groups and self._groups[first].weight == weight

    def _find_lightest(self) -> _Group:
        while not self._holds(self._lightest[0][0], -self._lightest[0][1]):
            heapq.heappop(self._lightest)
        return self._groups[-self._lightest[0][1]]


def _items(members: Any) -> list[int]:
    found, left = [], [members]
    while left:
        top = left.pop()
        if isinstance(top, tuple):
            left += top
        else:
            found.append(top)
    return found
