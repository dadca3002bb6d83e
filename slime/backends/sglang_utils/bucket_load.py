"""Load a bucket of weights in an engine: received in one broadcast, and by the copies of before when it comes again.

1. A bucket that comes again and again is loaded without asking the model where each tensor goes. SGLang's
   `load_weights` walks over the model for every bucket and finds the place of every tensor by its name: 30 us a
   tensor, most of a weight sync on a fast GPU. But what it does in the end is the same each time. So the first load of
   a bucket is SGLang's own, watched by torch: when it did nothing but copy parts of the bucket into parameters (look
   at parts of tensors, fill the padding of a vocabulary), these copies are kept, and the same bucket is loaded by them
   from then on, all in one call. A load that does more (casts first, quantises, computes something, has other threads
   copy) is never shortened. "The same bucket" means the same names, shapes, types and places in it; each parameter
   has to be where it was.
2. For load format "flattened_bucket" of `/update_weights_from_distributed` SGLang allocates every tensor, concatenates
   them to have a buffer to receive into, and loads the parts of that one by one: twice the bucket's memory, and a copy
   of it that holds nothing yet. Here the buffer is allocated alone, and loaded as one out of shared memory is. What is
   asked and what is broadcast stay the same, so a sender need not know. SGLang gives what was received to the model
   alone; here an engine that drafts with a model of its own gives it that bucket, too, as it does with one out of
   shared memory. A bucket of nothing is a broadcast of one byte, to see that the group works.

3. A version of which only elements came is written to just these (`ElementCopies`), by the copies that whole tensors
   were loaded with from files before.

With CUDA nothing of 1 and 2 waits for the device: the server answers as soon as receiving and copying are queued.
`install` changes the server that runs in this process.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.sglang_utils.weight_transfer import metadata_of, view_as

logger = logging.getLogger(__name__)

FAILED = "The bucket could not be received or loaded, so that the weights are neither the old nor the new ones"
MAX_BUCKETS = 4096
"""Of one model; who sends other buckets every time gets no recipes, and costs no more memory than this."""

NOT_SHORT = "is always loaded tensor by tensor, for loading it is more than copying"

Load = Callable[[], Any]


@dataclass(frozen=True)
class _Copy:
    """One copy of a recipe.

    Attributes:
        target: a part of a parameter.
        dtype: of what is copied. shape: of it. stride: of it. start: its first element, counted from the bucket's.
    """

    target: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class _Home:
    """Where a parameter was: `place[name]`, at an address."""

    place: dict[str, torch.Tensor | None]
    name: str
    address: int

    def is_unchanged(self) -> bool:
        held = self.place.get(self.name)
        return held is not None and held.data_ptr() == self.address


@dataclass(frozen=True)
class Recipe:
    """The copies that a load is made of.

    Attributes:
        copies: in any order, for no two of them write the same element.
        fills: (target, number), likewise.
        homes: of the parameters that they write.
    """

    copies: list[_Copy]
    fills: list[tuple[torch.Tensor, float]]
    homes: list[_Home]

    def holds(self) -> bool:
        """Whether every parameter is where it was."""
        return all(home.is_unchanged() for home in self.homes)

    @torch.no_grad()
    def load(self, data: torch.Tensor) -> None:
        """Copy everything out of a bucket, uint8 [num_bytes]."""
        typed = {dtype: view_as(data, dtype) for dtype in {copy.dtype for copy in self.copies}}
        first = {dtype: view.storage_offset() for dtype, view in typed.items()}
        sources = [
            torch.as_strided(typed[copy.dtype], copy.shape, copy.stride, first[copy.dtype] + copy.start)
            for copy in self.copies
        ]
        if sources:  # none of a bucket that the model has no use for, as a drafting model has of nearly all
            torch._foreach_copy_([copy.target for copy in self.copies], sources)
        for target, value in self.fills:
            target.fill_(value)


class Recipes:
    """Those of one model."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Recipe, Any] | None] = {}

    def load(self, model: torch.nn.Module, data: torch.Tensor, metadata: Sequence[Any], load: Load) -> Any:
        """Load a bucket by its recipe, or by `load`, which is watched the first time.

        Args:
            model: that takes the weights.
            data: the bucket, uint8 [num_bytes].
            metadata: SGLang's FlattenedTensorMetadata of each tensor in it.
            load: SGLang's own way.

        Returns:
            what `load` returned the first time.
        """
        key = (data.numel(), data.storage_offset() % 16, *((m.name, m.shape, m.dtype, m.start_idx) for m in metadata))
        if key in self._found:
            known = self._found[key]
            if known is None:
                return load()
            recipe, answer = known
            if recipe.holds():
                recipe.load(data)
                return answer
        if len(self._found) >= MAX_BUCKETS:
            self._found.clear()
        is_first_of_its_kind = None not in self._found.values()
        self._found[key] = None  # a load that fails is not watched when it is tried again
        watcher = _Watcher()
        with watcher, _noticing_threads(watcher):
            result = load()
        made = _recipe_of(model, data, watcher)
        if made is not None:
            self._found[key] = (made, result)
        elif is_first_of_its_kind:
            why = watcher.other or "it does not write parts of parameters once each"
            logger.warning("a bucket of weights (%s, ...) %s: %s", metadata[0].name, NOT_SHORT, why)
        return result


class _Watcher(TorchDispatchMode):
    """Notes what is written.

    Attributes:
        copies: (target, source) of each. fills: (target, number) of each.
        other: the first operation of another kind, unless it only looks at a part of a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        self.other: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, operands: Any = (), kwargs: Any = None) -> Any:
        """Do it, and note it."""
        if func is torch.ops.aten.copy_.default:
            self.copies.append((operands[0].detach(), operands[1].detach()))
        elif func is torch.ops.aten.fill_.Scalar:
            self.fills += [(operands[0].detach(), operands[1])] if operands[0].numel() else []
        elif not func.is_view:
            self.other = self.other or str(func)
        return func(*operands, **(kwargs or {}))


@contextlib.contextmanager
def _noticing_threads(watcher: _Watcher) -> Iterator[None]:
    """Tell a watcher of this thread that there is work for others, which it does not see.

    SGLang loads DeepSeek's weights so where they come in host memory.
    """
    submit, here = ThreadPoolExecutor.submit, threading.get_ident()

    def noted(*args: Any, **keywords: Any) -> Any:
        if threading.get_ident() == here:
            watcher.other = watcher.other or "work for other threads"
        return submit(*args, **keywords)

    ThreadPoolExecutor.submit = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _recipe_of(model: torch.nn.Module, data: torch.Tensor, watcher: _Watcher) -> Recipe | None:
    """What was written, if all of it goes into parameters, each element once, and every copy is of the bucket."""
    homes = _written(model, watcher)
    if homes is None:
        return None
    copies = [_copy_of(data, target, source) for target, source in watcher.copies]
    known = [copy for copy in copies if copy is not None]
    if len(known) < len(copies):
        return None
    return Recipe(known, watcher.fills, [home for found in homes.values() for home in found])


def _written(model: torch.nn.Module, watcher: _Watcher) -> dict[int, list[_Home]] | None:
    """The parameters that were written, by address; None where more was done than to write parts of some once each."""
    homes = _homes(model)
    targets = [target for target, _ in [*watcher.copies, *watcher.fills]]
    addresses = {target.untyped_storage().data_ptr() for target in targets}
    if watcher.other is not None or not addresses <= homes.keys() or not _are_apart(targets):
        return None
    return {address: homes[address] for address in addresses}


def _copy_of(data: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> _Copy | None:
    """A copy of a part of the bucket; None where it is of something else, or of another shape."""
    item = source.element_size()
    is_of_bucket = source.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    if not is_of_bucket or target.shape != source.shape or data.storage_offset() % item:
        return None
    start = source.storage_offset() - data.storage_offset() // item
    return _Copy(target, source.dtype, source.shape, source.stride(), start)


class ElementCopies:
    """Changes single elements of a model's tensors, by the copies that whole tensors were loaded with.

    Args:
        model: of an engine.

    Attributes:
        version: id of the weights that the model holds; None where that is not known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.version: str | None = None
        self._copies: dict[str, list[_Copy]] = {}
        self._sizes: dict[str, int] = {}
        self._homes: dict[int, list[_Home]] = {}

    def load(self, tensors: Mapping[str, torch.Tensor], load: Load, version: str) -> None:
        """Load whole tensors by `load`, which is watched.

        Args:
            tensors: by HF name, where `load` finds them in memory.
            load: SGLang's own way.
            version: what the model holds afterwards.
        """
        self.version = None
        if tensors.keys() >= self._copies.keys():
            self._copies, self._sizes, self._homes = {}, {}, {}
        watcher = _Watcher()
        with watcher, _noticing_threads(watcher):
            load()
        homes = _written(self._model, watcher)
        found = _copies_by_name(tensors, watcher.copies) if homes is not None else None
        if homes is None or found is None:
            self._copies = {}
            return
        self._copies |= found
        self._sizes |= {name: tensor.numel() for name, tensor in tensors.items()}
        self._homes |= homes
        self.version = version

    def take(self, file: Path, index: Any) -> bool:
        """Write the elements that a host's list has; False where there is none, or the model is of another base."""
        names, wanted = index["weight_map"], index["metadata"]
        if "base_id" not in wanted or not self.knows(names, wanted["base_id"]) or not file.is_file():
            return False
        device = next(self._model.parameters()).device
        with safe_open(file, framework="pt") as found:
            if found.metadata()["id"] != wanted["id"]:
                return False
            self.version = None
            for name in names:
                where, values = (found.get_tensor(f"{name}:{kind}").to(device) for kind in ("where", "values"))
                self.change(name, where.long() & 0xFFFFFFFF, values)
        self.version = wanted["id"]
        return True

    def knows(self, names: Iterable[str], version: str) -> bool:
        """Whether the model holds a version, and all of these tensors where they were loaded to."""
        is_there = all(home.is_unchanged() for homes in self._homes.values() for home in homes)
        return is_there and self.version == version and self._copies.keys() >= set(names)

    @torch.no_grad()
    def change(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [k], raw bits, at positions int64 [k] of a flattened tensor; both are where the model is."""
        for copy in self._copies[name]:
            flat, new = copy.target.view(-1), values.view(copy.dtype).to(copy.target.dtype)
            if flat.numel() == self._sizes[name]:  # no part of it: nothing to look up
                flat[positions] = new
                continue
            inside, where = _within(copy, positions)
            flat[where[inside]] = new[inside]


def _within(copy: _Copy, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions of a tensor a copy is of, and where they are in the copy."""
    rest = positions - copy.start
    inside, where = rest >= 0, torch.zeros_like(rest)
    for size, stride in _axes(copy.shape, copy.stride):
        at = torch.div(rest, stride, rounding_mode="floor")
        inside &= at < size
        where = where * size + at
        rest = rest - at * stride
    return inside & (rest == 0), where


def _axes(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]


def _copies_by_name(
    tensors: Mapping[str, torch.Tensor], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, list[_Copy]] | None:
    """The copies of each tensor; None where one is of something else, or turns axes."""
    found: dict[str, list[_Copy]] = {name: [] for name in tensors}
    places = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
    for target, source in copies:
        at = bisect.bisect_right(places, (source.data_ptr(), chr(0x10FFFF))) - 1
        if at < 0:
            return None
        begin, name = places[at]
        tensor, axes = tensors[name], _axes(source.shape, source.stride())
        start = (source.data_ptr() - begin) // source.element_size()
        is_part = start < tensor.numel() and source.dtype == tensor.dtype and target.shape == source.shape
        is_in_order = all(stride >= size * inner for (_, stride), (size, inner) in itertools.pairwise(axes))
        if not (is_part and is_in_order and tensor.is_contiguous()):
            return None
        found[name].append(_Copy(target, source.dtype, source.shape, source.stride(), start))
    return found


def _homes(model: torch.nn.Module) -> dict[int, list[_Home]]:
    """Parameters and buffers by the address of their storage."""
    found: dict[int, list[_Home]] = {}
    for place, name, tensor in _places(model):
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(_Home(place, name, tensor.data_ptr()))
    return found


def _places(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            yield from ((place, name, tensor) for name, tensor in place.items() if tensor is not None)


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two of them share memory; only of contiguous ones that is easy to say."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    return all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def install() -> None:
    """Change how the server of this process loads a "flattened_bucket"; imports SGLang."""
    from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    load = WeightUpdater._update_weights_from_flattened_bucket
    of_model: WeakKeyDictionary[torch.nn.Module, Recipes] = WeakKeyDictionary()

    def load_quickly(updater: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> Any:
        model, bucket = updater.get_model(), flattened_tensor_bucket_dict
        recipes = of_model.setdefault(model, Recipes())
        return recipes.load(model, bucket["flattened_tensor"], bucket["metadata"], lambda: load(updater, bucket))

    WeightUpdater._update_weights_from_flattened_bucket = load_quickly

    WeightUpdater._update_bucketed_weights_from_distributed = _receive
    manager = of_scheduler.SchedulerWeightUpdaterManager
    update = manager.update_weights_from_distributed

    def update_both(self: Any, request: Any) -> Any:
        runner = of_scheduler._get_draft_model_runner(self.draft_worker) if self.draft_worker is not None else None
        _drafts[:] = [] if runner is None else [runner.weight_updater]
        try:
            return update(self, request)
        finally:
            _drafts.clear()

    manager.update_weights_from_distributed = update_both


_drafts: list[Any] = []
"""Updaters of the models with which this engine drafts, while it receives."""


def _receive(
    updater: Any, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group_name: str
) -> tuple[bool, str]:
    """As SGLang's method: whether it worked, and what to answer."""
    try:
        if not names:
            return _try(updater, group_name)
        num_bytes, metadata = layout_of(tuple(names), tuple(map(str, dtypes)), tuple(map(tuple, shapes)))
        data = torch.empty(num_bytes, dtype=torch.uint8, device=updater.device)
        torch.distributed.broadcast(data, src=0, group=updater._model_update_group[group_name])
        bucket = {"flattened_tensor": data, "metadata": metadata}
        for taker in (*(draft for draft in _drafts if draft is not updater), updater):
            taker._update_weights_from_flattened_bucket(bucket)
    except Exception as error:  # the server has to answer, and to go on
        logger.exception(FAILED)
        return False, f"{FAILED}: {type(error).__name__}: {error}"
    return True, "Succeeded to update parameter online."


def _try(updater: Any, group_name: str) -> tuple[bool, str]:
    """A broadcast of one byte, waited for: communicators are made in the first one, and fail in it."""
    data = torch.zeros(1, dtype=torch.uint8, device=updater.device)
    torch.distributed.broadcast(data, src=0, group=updater._model_update_group[group_name])
    return data.item() == 1, "received one byte"


@functools.lru_cache(maxsize=4096)
def layout_of(
    names: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, list[Any]]:
    """How many bytes a bucket has, and SGLang's description of what lies where: one tensor right behind the other."""
    kinds = [getattr(torch, name.removeprefix("torch.")) for name in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
    starts = list(itertools.accumulate(sizes, initial=0))
    places = zip(names, map(torch.Size, shapes), kinds, starts, strict=False)
    return starts[-1], metadata_of(tuple(places))
