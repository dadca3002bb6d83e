"""Copies of weights in host memory, which take the place of the live ones for a while.

The spelling of the file's name is upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


class TensorBackuper:
    """Named copies of live tensors; the live ones are overwritten in place: an optimizer's views stay valid.

    Example:
        >>> weight = torch.ones(2)
        >>> backuper = TensorBackuper(lambda: [("weight", weight)])
        >>> backuper.backup("ref")
        >>> _ = weight.fill_(5)
        >>> with backuper.swapped("ref"):
        ...     print(weight.tolist())
        [1.0, 1.0]
        >>> weight.tolist()
        [5.0, 5.0]

    Args:
        source_getter: yields (name, live tensor); the same names at every call.
    """

    _SWAPPED_OUT = "the tensors that `swapped` put aside"

    def __init__(self, source_getter: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._named_tensors = source_getter
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def tags(self) -> list[str]:
        """Tags that can be restored."""
        return [tag for tag in self._copies if tag != self._SWAPPED_OUT]

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copy the live tensors to host memory under `tag`, over what it held."""
        copies = self._copies.setdefault(tag, {})
        for name, live in self._named_tensors():
            if name not in copies:
                copies[name] = torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)
            copies[name].copy_(live, non_blocking=live.is_cuda)
        _wait_for_copies()

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Overwrite the live tensors with the copies under `tag`.

        Raises:
            KeyError: nothing was backed up under `tag`.
        """
        if tag not in self._copies:
            raise KeyError(f"no weights are backed up under {tag!r}; there are {self.tags}")
        copies = self._copies[tag]
        for name, live in self._named_tensors():
            live.copy_(copies[name], non_blocking=live.is_cuda)
        _wait_for_copies()

    def copies(self, tag: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Name -> the copy itself under `tag`, in host memory."""
        yield from self._copies[tag].items()

    def drop(self, tag: str) -> None:
        """Forget the copies under `tag`, and free their memory; a tag that holds nothing is left alone."""
        self._copies.pop(tag, None)

    def equals(self, tag: str) -> bool:
        """Whether the live tensors hold, bit by bit, what is backed up under `tag`; False where nothing is."""
        copies = self._copies.get(tag)
        if copies is None:
            return False
        return all(torch.equal(live.cpu(), copies[name]) for name, live in self._named_tensors())

    @contextmanager
    def swapped(self, tag: str) -> Iterator[None]:
        """The live tensors hold the copies of `tag` inside the block, and what they held before it afterwards."""
        self.backup(self._SWAPPED_OUT)
        try:
            self.restore(tag)
            yield
        finally:
            self.restore(self._SWAPPED_OUT)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
