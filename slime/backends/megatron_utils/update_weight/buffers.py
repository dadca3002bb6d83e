"""Memory in which a bucket lies as one run of bytes, and from which other processes read it.

On CPU it is shared memory, on CUDA device memory for IPC handles. There is one buffer a slot, so that a bucket can be
made ready while another one is read. It knows nothing about engines or handles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.sglang_utils.weight_transfer import Place
from slime.utils.memory_saver import outside_saver

ALIGNMENT = 256
"""Bytes: what a view of any dtype needs, and what lets the device copy at full speed."""


Kind = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""Name, shape and type of each tensor of a bucket."""
MAX_LAYOUTS = 4096


@dataclass(frozen=True)
class FlatBucket:
    """Tensors that lie one behind the other in a run of bytes.

    Attributes:
        data: uint8 [num_bytes].
        places: of the tensors.
    """

    data: torch.Tensor
    places: tuple[Place, ...]


@dataclass(frozen=True)
class _Layout:
    """Where the tensors of a bucket lie; `views` has (type, shape, strides, first element) of each."""

    num_bytes: int
    places: tuple[Place, ...]
    views: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]


@functools.lru_cache(maxsize=MAX_LAYOUTS)
def _layout_of(kind: Kind) -> _Layout:
    """Computed once: the buckets of every sync are the same."""
    places, views, end = list[Place](), [], 0
    for name, shape, dtype in kind:
        places.append((name, shape, dtype, end))
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        views.append((dtype, shape, strides, end // dtype.itemsize))
        end += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return _Layout(end, tuple(places), views)


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
        typed = {dtype: data.view(dtype) for dtype in {dtype for dtype, _, _, _ in layout.views}}
        with torch.no_grad():
            parts = [torch.as_strided(typed[dtype], *where) for dtype, *where in layout.views]
            torch._foreach_copy_(parts, [tensor for _, tensor in tensors])
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
