"""Split weighted items into k groups of nearly equal weight (Karmarkar-Karp, the largest differencing method).

Pure arithmetic over a list of numbers: it does not know what an item is (a sample, a micro-batch) nor what its weight
measures (tokens,
FLOPs). Ties are broken by position, so the same input always gives the same split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
    states = [
        _State.of_items(items[start : start + width], seqlen_list, k_partitions)
        for start in range(0, num_items, width)
    ]
    heap = [(-state.spread, order, state) for order, state in enumerate(states)]
    heapq.heapify(heap)
    order = len(states)
    while len(heap) > 1:
        merged = heapq.heappop(heap)[2].merge(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-merged.spread, order, merged))
        order += 1
    partitions = [sorted(members) for _, members in heap[0][2].groups]
    if any(not members for members in partitions):  # zero weights can leave a group empty
        partitions = _fill_empty(partitions)
    return sorted(partitions)


class _State:
    """k groups, heaviest first: (weight, members)."""

    def __init__(self, groups: list[tuple[float, list[int]]]) -> None:
        self.groups = sorted(groups, key=lambda group: (-group[0], group[1]))

    @classmethod
    def of_items(cls, items: list[int], weights: Sequence[float], k: int) -> _State:
        groups: list[tuple[float, list[int]]] = [(weights[i], [i]) for i in items]
        return cls(groups + [(0, []) for _ in range(k - len(items))])

    @property
    def spread(self) -> float:
        return self.groups[0][0] - self.groups[-1][0]

    def merge(self, other: _State) -> _State:
        """The heaviest group of one joins the lightest of the other."""
        pairs = zip(self.groups, reversed(other.groups), strict=True)
        return _State([(a_weight + b_weight, a + b) for (a_weight, a), (b_weight, b) in pairs])


def _fill_empty(partitions: list[list[int]]) -> list[list[int]]:
    for members in partitions:
        if not members:
            members.append(max(partitions, key=len).pop())
    return partitions
