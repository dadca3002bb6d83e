"""Progress bars behind one factory, so that code which counts work need not know how the count is shown.

It knows nothing about Ray: a process whose terminal is elsewhere installs its own factory with `set_progress_factory`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self


class ProgressBar(Protocol):
    """What a caller may do with a bar; `tqdm.tqdm` is one."""

    def update(self, n: int = 1) -> object:
        """Count `n` more units of work as done."""

    def close(self) -> object:
        """Leave the bar at its last state."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...


ProgressFactory = Callable[[int, str], ProgressBar]


def tqdm_bar(total: int, desc: str) -> ProgressBar:
    """A tqdm bar on stderr; where stderr is no terminal it is refreshed rarely: each refresh becomes a line."""
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    return tqdm(
        total=total, desc=desc, leave=False, mininterval=0.5 if is_terminal else 15.0, dynamic_ncols=is_terminal
    )


class _Factory:
    """The owner of this process's choice of bar."""

    make: ProgressFactory = staticmethod(tqdm_bar)


def set_progress_factory(factory: ProgressFactory) -> None:
    """Use `factory(total, desc)` for every bar made from now on in this process."""
    _Factory.make = staticmethod(factory)


def progress_bar(total: int, desc: str) -> ProgressBar:
    """Make a bar over `total` units of work, labelled `desc`; use it as a context manager or call `close`."""
    return _Factory.make(total, desc)
