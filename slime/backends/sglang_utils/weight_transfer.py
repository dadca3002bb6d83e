"""SGLang's side of a weight sync, for the sender: engines to call, buckets and handles.

Run as a script it is the process that `opened_elsewhere` starts.

The one module that `megatron_utils/update_weight` imports from this package.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.backends.sglang_utils.engine_client import DirectEngine, EngineContact
from slime.backends.sglang_utils.weight_samples import agrees, on_host, sample
from slime.weights.adapters import STACKED, stacks_of

__all__ = [
    "EXPECTED",
    "NUM_BYTES",
    "DirectEngine",
    "EngineContact",
    "SharedRoom",
    "SharedTensors",
    "adapter_tensors_of",
    "agrees",
    "in_shared_memory",
    "metadata_of",
    "on_host",
    "open_flat",
    "opened_elsewhere",
    "preload",
    "sample",
    "serialize_bucket",
    "serialize_flat",
    "start_opener",
    "view_as",
]

if TYPE_CHECKING:
    import torch

NUM_BYTES = 2 * 1024**2
EXPECTED = 7
"""What each byte of the memory has to be that `opened_elsewhere` opens."""
OPEN_DEADLINE_S = 120.0

Place = tuple[str, "torch.Size", "torch.dtype", int]
"""Name, shape and type of a tensor, and the byte at which it begins."""


def view_as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [num_bytes] as so many elements of a type as there is room for; bytes at the end may be left over."""
    return data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def serialize_bucket(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Flatten tensors into one, and return a handle to its memory for one receiver (see `serialize_flat`).

    The memory lives until the receiver has opened it and let go of it.
    """
    _prepare()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(named_tensors))
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return MultiprocessingSerializer.serialize(content, output_str=True)


def serialize_flat(data: torch.Tensor, places: Sequence[Place], num_receivers: int) -> tuple[list[str], Any]:
    """Handles to memory in which tensors lie, for load format "flattened_bucket".

    On CPU the memory is shared memory that a handle names. With CUDA it is an IPC handle with an event: the receiver's
    stream waits for what is queued on this thread's stream now, so nobody has to wait here.

    Args:
        data: uint8 [num_bytes], shared memory or CUDA memory; it is used again and again.
        places: what lies where; the same ones are described once.
        num_receivers: processes (an engine has one a TP rank) that will open it. Each needs a handle of its own:
            opening one takes back a reference that serializing it added.

    Returns:
        (handles, something to keep until every receiver has answered and to drop then).
    """
    _prepare()
    import torch
    from sglang.srt.utils import MultiprocessingSerializer

    if data.is_cuda:
        # torch wraps the storage that it shares once more each time: an alias is wrapped, and forgotten afterwards.
        data = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(data))
    content = {"flattened_tensor": data if data.is_cuda else _OnHost(data), "metadata": metadata_of(tuple(places))}
    return [MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(num_receivers)], data


class _OnHost:
    """A tensor in host memory, written as torch writes it: SGLang's patch takes every tensor for one on a GPU."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        from torch.multiprocessing import reductions

        return getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)(self._data)


class SharedTensors(NamedTuple):
    """Tensors in one piece of shared memory, which engines keep for as long as they have an adapter.

    Attributes:
        data: uint8 [num_bytes], the memory; new for each adapter.
        places: what lies where, for engines: those that they fuse are one. parts: the same by PEFT's names.
    """

    data: torch.Tensor
    places: tuple[Place, ...]
    parts: tuple[Place, ...]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the memory, by PEFT's names."""
        sized = [
            (name, shape, dtype, start, shape.numel() * dtype.itemsize) for name, shape, dtype, start in self.parts
        ]
        return {name: self.data[at : at + size].view(dtype).view(shape) for name, shape, dtype, at, size in sized}


class SharedRoom:
    """Shared memory with all its pages: getting them takes longer than a copy. Any thread may make and close it.

    A GPU writes it at the speed of its link until it is closed, which has to be before the memory goes: this object
    holds it until then.

    Args:
        num_bytes: of it.
        writer: what will fill it. Where that is a GPU, make it in a thread that does no other work with one: if the
            driver cannot register the memory, torch would find the error there.

    Attributes:
        data: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int, writer: torch.device | None = None) -> None:
        import torch

        self._gpu: torch.device | None = None
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)  # named by a file, also with CUDA
        self.data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,)).zero_()
        if writer is not None and writer.type == "cuda":
            with torch.cuda.device(writer):
                failed = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), num_bytes, 0))
            self._gpu = None if failed else writer

    def close(self) -> None:
        """Leave the memory to those who share it."""
        if self._gpu is not None:
            import torch

            gpu, self._gpu = self._gpu, None
            with torch.cuda.device(gpu):
                torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())

    __del__ = close


def in_shared_memory(tensors: Mapping[str, torch.Tensor], room: SharedRoom | None = None) -> SharedTensors:
    """Copy an adapter's tensors of one type to shared memory; from a GPU all at once, and without a copy in between.

    Args:
        tensors: by PEFT's names.
        room: which nobody has used yet; taken where it has their size.
    """
    _prepare()
    import torch

    places, parts, num_bytes = _layout_of(
        tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    )
    if room is None or room.data.numel() != num_bytes:
        room = SharedRoom(num_bytes)
    with torch.no_grad():
        flat = [tensors[part[0]].reshape(-1) for part in parts]
        as_elements = room.data.view(flat[0].dtype)
        if flat[0].device == as_elements.device:
            torch.cat(flat, out=as_elements)
        else:
            as_elements.copy_(torch.cat(flat))
    return SharedTensors(room.data, places, parts)


@functools.lru_cache(maxsize=256)
def _layout_of(
    kinds: tuple[tuple[str, torch.Size, torch.dtype], ...],
) -> tuple[tuple[Place, ...], tuple[Place, ...], int]:
    """(places, parts, bytes of all) as of `SharedTensors`; computed once, for all versions of an adapter are alike."""
    of_name, places, parts, at = {name: (shape, dtype) for name, shape, dtype in kinds}, [], [], 0
    for engines_name, names in stacks_of(of_name).items():
        (first, dtype), rows = of_name[names[0]], sum(of_name[name][0][0] for name in names)
        places.append((engines_name, type(first)((rows, *first[1:])), dtype, at))
        for name in names:
            parts.append((name, of_name[name][0], dtype, at))
            at += of_name[name][0].numel() * dtype.itemsize
    return tuple(places), tuple(parts), at


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Have torch name shared memory by a file, also with CUDA: see `_prepare`."""
    import torch

    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def adapter_tensors_of(
    shared: SharedTensors, config: Mapping[str, Any], sizes: Sequence[int], *, with_checksums: bool
) -> tuple[list[dict[str, Any]], Any]:
    """A LoRA adapter in shared memory, as `EngineClient.load_adapter` takes it.

    Args:
        shared: whole tensors; each rank of an engine takes its share of them.
        config: what SGLang reads of adapter_config.json.
        sizes: ranks of each engine.
        with_checksums: the engines compare a checksum of every tensor; that takes a second for a gigabyte.

    Returns:
        (what each engine gets, something to keep until all have answered).
    """
    with _sharing_by_name():
        handles, kept = serialize_flat(shared.data, shared.places, sum(sizes))
    left = iter(handles)
    common: dict[str, Any] = {"config_dict": {**config, STACKED: True}, "load_format": "flattened_bucket"}
    if with_checksums:
        spans = {
            name: shared.data[start : start + shape.numel() * dtype.itemsize]
            for name, shape, dtype, start in shared.places
        }
        common["expected_checksums"] = {name: hashlib.sha256(span.numpy()).hexdigest() for name, span in spans.items()}
    return [common | {"serialized_named_tensors": list(itertools.islice(left, size))} for size in sizes], kept


@functools.lru_cache(maxsize=4096)
def metadata_of(places: tuple[Place, ...]) -> list[Any]:
    """SGLang's description of a bucket; shapes as plain tuples, which are serialized and opened faster."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    return [
        FlattenedTensorMetadata(
            name=name,
            shape=tuple(shape),
            dtype=dtype,
            start_idx=start,
            end_idx=start + shape.numel() * dtype.itemsize,
            numel=shape.numel() * dtype.itemsize,
        )
        for name, shape, dtype, start in places
    ]


def open_flat(handle: str) -> torch.Tensor:
    """The memory behind a handle of `serialize_flat`, in another process."""
    _prepare()
    from sglang.srt.utils import MultiprocessingSerializer

    data: torch.Tensor = MultiprocessingSerializer.deserialize(handle)["flattened_tensor"]
    return data


def preload() -> None:
    """Import now what the first sync would otherwise wait for (1 to 2 s)."""
    _prepare()
    import sglang.srt.utils.common
    import sglang.srt.weight_sync.tensor_bucket  # noqa: F401


@functools.cache
def _prepare() -> None:
    from slime.backends.sglang_utils import cpu_standins

    cpu_standins.install()
    import torch

    if not torch.cuda.is_available():
        # torch's default passes a file descriptor over a socket that asks for a key the server does not have: it would
        # die of an AuthenticationError.
        torch.multiprocessing.set_sharing_strategy("file_system")
        return
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    # Handles then name the GPU by its id: trainer and engine count the GPUs that they see differently.
    monkey_patch_torch_reductions()


_openers: list[subprocess.Popen[str]] = []
"""Started ahead of `opened_elsewhere`."""


def start_opener() -> None:
    """Start the process that `opened_elsewhere` asks, which imports for half a minute on some machines. It takes no
    GPU before it is asked, and ends with this process."""
    # The saver of GPU memory is not for that process; nothing of it is to be given up.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and not name.startswith("TMS_")}
    command = [sys.executable, "-m", "slime.backends.sglang_utils.weight_transfer"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    _openers.append(subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=nowhere, stderr=pipe))


def opened_elsewhere(handle: str) -> str | None:
    """Open a handle to `NUM_BYTES` of `EXPECTED` in another process, as an engine does; returns why that failed."""
    if not _openers:
        start_opener()
    with _openers.pop() as opener:
        try:
            _, said = opener.communicate(handle, timeout=OPEN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            opener.kill()
            return f"another process did not open the memory within {OPEN_DEADLINE_S:.0f} s"
    if opener.returncode == 0:
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {opener.returncode}"


def main() -> None:
    """Open the handle on standard input and read its memory."""
    preload()
    data = open_flat(sys.stdin.read().strip())
    if data.numel() != NUM_BYTES or not bool((data == EXPECTED).all()):
        raise SystemExit("the memory that was opened holds something else")


if __name__ == "__main__":
    main()
