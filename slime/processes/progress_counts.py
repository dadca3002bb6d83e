"""Counts of what this process has done, and of work that is under way, for whoever watches or shows them.

Code that works calls `went_on` and counts with `progress_bar`; `slime.ray.stalls` carries both to the driver.
"""

from __future__ import annotations

from collections import Counter
from typing import Self

_counts: Counter[str] = Counter()


def went_on(what: str, amount: int = 1) -> None:
    """Count something that was done ("samples"). Cheap; two threads may lose a count to each other, never all."""
    _counts[what] += amount


def counts() -> dict[str, int]:
    """Everything that was counted in this process."""
    return dict(_counts)


Count = tuple[str, int, int]  # (what is done, how much of it is done, how much there is).


class ProgressBar:
    """A count of `total` units of work; it is under way from its making until `close`, or as long as its block.

    Args:
        total: units of work.
        what: is done.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        _under_way.append(self)

    def update(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        self.done += n

    def close(self) -> None:
        """The work is over."""
        if self in _under_way:
            _under_way.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


progress_bar = ProgressBar
_under_way: list[ProgressBar] = []


def counts_under_way() -> list[Count]:
    """The counts of this process, in the order in which they were begun."""
    return [(bar.what, bar.done, bar.total) for bar in list(_under_way)]
