"""Counts of work that is under way in this process, for whoever shows them.

Code that works counts with `progress_bar`; another process reads `counts_under_way` (`slime.ray.progress_board`
carries them to the driver) and draws them.
"""

from __future__ import annotations

from typing import Self

Count = tuple[str, int, int]
"""(what is done, how much of it is done, how much there is)."""


class ProgressBar:
    """A count of `total` units of work; it is under way from its making until `close`, or as long as its block."""

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


_under_way: list[ProgressBar] = []


def progress_bar(total: int, what: str) -> ProgressBar:
    """Count `total` units of work, called `what`; use the result as a context manager or call `close`."""
    return ProgressBar(total, what)


def counts_under_way() -> list[Count]:
    """The counts of this process, in the order in which they were begun."""
    return [(bar.what, bar.done, bar.total) for bar in list(_under_way)]
