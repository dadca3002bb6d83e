"""Memory in which a bucket lies as one run of bytes, and from which it is read or broadcast.

On CPU it is shared memory, on CUDA device memory for IPC handles and NCCL. There is one buffer a slot, so that a
bucket can be made ready while another one is read.

Tensors follow each other without a gap: that is how SGLang lays a bucket out that it receives in a broadcast, where
only names, types and shapes are told. Their order makes sure that a view of each may begin where it does: first those
of whole blocks of 256 bytes, which are nearly all, then the others, the widest type first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.sglang_utils.weight_transfer import Place, view_as
from slime.utils.accelerator.memory_saver import outside_saver

BLOCK = 256
"""Bytes: where a tensor begins at a multiple of it, the device copies at full speed."""


Kind = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""Name, shape and type of each tensor of a bucket."""
MAX_LAYOUTS = 4096


@dataclass(frozen=True)
class FlatBucket:
    """Tensors that lie one behind the other in a run of bytes.

    Attributes:
        data: uint8 [num_bytes].
        places: of the tensors, in the order in which they lie.
    """

    data: torch.Tensor
    places: tuple[Place, ...]


@dataclass(frozen=True)
class _Layout:
    """Where the tensors of a bucket lie.

    Attributes:
        num_bytes: of all.
        order: numbers of the tensors, in the order in which they lie; the others are in this order.
        places: as of `FlatBucket`.
        views: (type, shape, strides, first element) of each.
    """

    num_bytes: int
    order: list[int]
    places: tuple[Place, ...]
    views: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]


@functools.lru_cache(maxsize=MAX_LAYOUTS)
def _layout_of(kind: Kind) -> _Layout:
    """Computed once: the buckets of every sync are the same."""
    sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in kind]
    # Sorting is stable: as far as may be, tensors stay in the order in which they came.
    order = sorted(range(len(kind)), key=lambda i: -kind[i][2].itemsize if sizes[i] % BLOCK else -BLOCK)
    starts = list(itertools.accumulate((sizes[i] for i in order), initial=0))
    placed = [(*kind[i], start) for i, start in zip(order, starts[:-1], strict=True)]
    views = [(dtype, shape, _strides(shape), start // dtype.itemsize) for _, shape, dtype, start in placed]
    return _Layout(starts[-1], order, tuple(placed), views)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class BucketBuffers:
    """The buffers of this rank.

    Args:
        num_slots: how many.
        size: bytes of one, as a rule; a small model takes less, a single tensor that is larger takes more.
        device: where they lie.
    """

    def __init__(self, num_slots: int, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * num_slots
        self._pool: Any = None

    def fill(self, slot: int, tensors: Sequence[tuple[str, torch.Tensor]]) -> FlatBucket:
        """Copy tensors into a buffer, each straight from where it lies (queued on the current stream of a GPU)."""
        layout = _layout_of(tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors))
        data = self._at_least(slot, layout.num_bytes)[: layout.num_bytes]
        typed = {dtype: view_as(data, dtype) for dtype in {dtype for dtype, _, _, _ in layout.views}}
        with torch.no_grad():
            parts = [torch.as_strided(typed[dtype], *where) for dtype, *where in layout.views]
            torch._foreach_copy_(parts, [tensors[i][1] for i in layout.order])
        return FlatBucket(data, layout.places)

    def release(self) -> None:
        """Give all buffers back to the device."""
        self._buffers = [None] * len(self._buffers)
        self._pool = None  # the last one to hold it: its memory goes back at once, not into torch's cache

    def _at_least(self, slot: int, num_bytes: int) -> torch.Tensor:
        found = self._buffers[slot]
        if found is None or found.numel() < num_bytes:
            self._buffers[slot] = None  # first, so that the two are not there at once
            # A bucket that is nearly full says that there will be more of them, some a little larger.
            found = self._allocate(max(num_bytes, self._size) if num_bytes > self._size // 4 else num_bytes)
            self._buffers[slot] = found
        return found

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        if self._pool is None:
            # Memory from torch's own pool may be left over from a managed block, whose handle no process can open.
            self._pool = torch.cuda.MemPool()
        with outside_saver(), torch.cuda.use_mem_pool(self._pool):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
