"""Buckets of weights on their way to engines, as a rank that sends sees them: the memory that one lies in, and one
attempt to send them all (which are under way, what has been confirmed).

Each bucket is posted over a `Transport` as soon as it is ready, under a version of its own. At most as many are under
way as the transports have slots: one is loaded while the next is made ready. The sync's own version is set later, when
`finish` has seen every bucket confirmed. After a failure nothing more is posted; the other ranks still go through all
buckets, so this one has to as well. A `Timeline` says where the time went, by the host's clock.

A bucket lies in memory as one run of bytes, from which it is read or broadcast: on CPU in shared memory, on CUDA in
device memory for IPC handles and NCCL. There is one buffer a slot, so that a bucket can be made ready while another
one is read.

Tensors follow each other without a gap: that is how SGLang lays a bucket out that it receives in a broadcast, where
only names, types and shapes are told. Their order makes sure that a view of each may begin where it does: first those
of whole blocks of 256 bytes, which are nearly all, then the others, the widest type first.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from slime.backends.megatron_utils.update_weight.engines import Calls, EngineFleet, WeightSyncError, contact_of
from slime.backends.sglang_utils.weight_transfer import Place, view_as
from slime.processes.progress import went_on
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


Bucket = list[tuple[str, torch.Tensor]]
"""(HF name, full tensor); views of live parameters as a rule."""
T = TypeVar("T")


def _nothing() -> None:
    pass


@dataclass
class Posted:
    """A bucket that was handed to engines.

    Attributes:
        calls: to each engine; their results are the versions that the engines have now.
        finish: to be called once every engine has answered.
        slot, version: of the bucket.
    """

    calls: Calls = field(default_factory=dict)
    finish: Callable[[], None] = _nothing
    slot: int = 0
    version: str = ""


class Transport(ABC):
    """A way to carry buckets to some of the engines: make one ready, then hand it over.

    All ranks have it and call `prepare`; the source rank calls `post`.

    Attributes:
        num_slots: buckets that may be on their way at once; each slot is used again only when every engine has
            answered for the bucket that was in it.
        shares_memory: engines read what other ranks than the source have prepared, so that these, too, must know
            when a slot is free.
        keeps_order: a bucket that one engine has not taken leaves it out of step, until the way is opened anew.
    """

    num_slots = 1
    shares_memory = False
    keeps_order = False

    @abstractmethod
    def prepare(self, bucket: Bucket, *, slot: int) -> Any:
        """Make a bucket ready (collective); it must not depend on `bucket` afterwards."""

    @abstractmethod
    def post(self, prepared: Any, *, version: str) -> Posted:
        """Begin handing it over, as this version of the engines' weights (source rank only)."""

    def timings(self) -> str:
        """For the log, what a device did since this was last asked; of most transports nothing is known."""
        return ""

    def close(self) -> None:  # noqa: B027
        """Give the way up; another one is opened in its place."""

    def release(self) -> None:  # noqa: B027 - most have nothing to give up
        """Give up what is needed only during a sync."""


Post = Callable[[Any, str], Posted]
"""(a prepared bucket, its version) -> what was handed to the engines."""


class BucketStream:
    """The buckets of one attempt.

    Args:
        fleet: every engine that must confirm each bucket.
        post: hands a bucket over.
        version: of the sync, or of one rank's part of it.
        num_slots: buckets that may be under way at once.

    Attributes:
        error: the first failure.
    """

    def __init__(self, fleet: EngineFleet, post: Post, *, version: int | str, num_slots: int) -> None:
        self._fleet = fleet
        self._post = post
        self._version = version
        self._num_slots = num_slots
        self._under_way: list[Posted] = []
        self._num_posted = 0
        self.answer_times: list[float] = []
        """Seconds from posting each bucket to its last answer, which may have waited for those of earlier ones."""
        self.error: WeightSyncError | None = None

    def make_room(self, slot: int) -> None:
        """Wait until `slot` is free."""
        self._unless_failed(lambda: self._wait_while(lambda one: one.slot == slot))

    def send(self, prepared: Any, slot: int) -> None:
        """Post the next bucket as version "v.i"."""
        self._unless_failed(lambda: self._post_one(prepared, slot))

    def finish(self) -> None:
        """Wait until everything is confirmed."""
        self._unless_failed(lambda: self._wait_while(lambda one: True))
        for left in self._under_way:  # after a failure: the next attempt must not write where engines still read
            with suppress(WeightSyncError):
                self._fleet.wait(left.calls, f"the load of weights {left.version}")

    def _unless_failed(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except WeightSyncError as error:
                self.error = error

    def _post_one(self, prepared: Any, slot: int) -> None:
        if len(self._under_way) == self._num_slots:
            self._confirm_first()
        version = f"{self._version}.{self._num_posted}"
        begin = time.monotonic()
        posted = self._post(prepared, version)
        posted.slot, posted.version = slot, version
        self._under_way.append(posted)
        index, self._num_posted = self._num_posted, self._num_posted + 1
        self.answer_times.append(0.0)

        def note(_: Any) -> None:
            self.answer_times[index] = time.monotonic() - begin

        for call in posted.calls.values():
            call.add_done_callback(note)

    def _wait_while(self, is_in_the_way: Callable[[Posted], bool]) -> None:
        while any(is_in_the_way(one) for one in self._under_way):
            self._confirm_first()

    def _confirm_first(self) -> None:
        first = self._under_way.pop(0)
        answers = self._fleet.wait(first.calls, f"the load of weights {first.version}")
        first.finish()
        check_versions(self._fleet, dict(zip(first.calls, answers, strict=True)), first.version)
        went_on("buckets of weights")


class Timeline:
    """Seconds by stage, in the order in which stages were first seen.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The block's time belongs to a stage."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - begin

    def making(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items; the time until each is there belongs to a stage."""
        left, end = iter(items), object()
        while True:
            with self.stage(name):
                item = next(left, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.4f}" for name, seconds in self._seconds.items())


def check_versions(fleet: EngineFleet, found: Mapping[int, Any], version: str) -> None:
    """Raise WeightSyncError unless every engine says that it has this version."""
    wrong = [
        f"{contact_of(engine, number)} is at {found.get(number)}"
        for number, engine in fleet.engines.items()
        if str(found.get(number)) != version
    ]
    if wrong:
        raise WeightSyncError(f"a bucket of weights was lost: not at version {version}: {'; '.join(wrong)}")
