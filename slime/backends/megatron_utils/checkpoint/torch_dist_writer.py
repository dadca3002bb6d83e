"""Write the weights of a Megatron model as a torch_dist checkpoint without ever holding the model.

The model is built without memory: Megatron itself says how each parameter is called and cut in the checkpoint. The
values are asked for one parameter at a time and written into files of bounded size, by threads. What
`checkpoint.save_checkpoint` writes of a model in memory is the same but for the files that it is in. A checkpoint that
was cut off is gone on with: parts that are complete are kept. The checksums of the manifest are made of the bytes as
they are handed to the file, so that nothing is read back; a part counts as complete only when it is on the disk. It
knows nothing about HF.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from slime.backends.megatron_utils.checkpoint.iterations import give_name
from slime.backends.megatron_utils.model.model_weights import iter_weights, named_tensors
from slime.utils import manifest
from slime.utils.checkpoint_paths import MODEL_SHAPE_FILE, iteration_dir
from slime.utils.conversion.file_copy import Segment, copy_into, range_in, tiles
from slime.utils.conversion.partial_dir import (
    PLAN_FILE,
    check_room,
    growing_alone,
    open_partial,
    said_of_disk,
    take_back,
)
from slime.utils.conversion.progress import Bar, run_in_threads
from slime.utils.errors import UsageError
from slime.utils.manifest import entries_of, to_disk, write_manifest

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART_BYTES, LEAST_PART_BYTES, USUAL_PARTS = 512 * 1024**2, 64 * 1024**2, 16
"""So many files, unless they would be too large or too small: while one goes to the disk others are written."""
# As megatron.core.dist_checkpointing.save marks a directory.
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Parameter:
    """One weight of the model and its place in the checkpoint.

    Attributes:
        name: in the whole model, for the rule tables.
        shape: of the full weight.
        place: Megatron's description; its data has no memory.
        dtype: to write.
    """

    name: str
    shape: tuple[int, ...]
    place: ShardedTensor | ShardedTensorFactory
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def chunks(self, value: torch.Tensor) -> list[ShardedTensor]:
        """What is stored for it; gate and up of a gated MLP are two."""
        place = self.place
        if isinstance(place, ShardedTensor):
            place.data = value
            return [place]
        built = place.build_fn(place.key, value, place.replica_id, place.flattened_range)
        return [one for one in _leaves(built) if isinstance(one, ShardedTensor)]


def parameters_of(
    model: torch.nn.Module, dtype_of: Callable[[str], torch.dtype]
) -> tuple[list[Parameter], list[ShardedObject]]:
    """The weights of a whole model (one rank) that may be without memory, and the objects beside them.

    Args:
        model: bare.
        dtype_of: of a weight with that name; tensors that are stored as one get the narrowest that holds all of them.
    """
    names = {there: weight.name for (there, _), weight in zip(named_tensors(model), iter_weights(model), strict=True)}
    weights: dict[str, Any] = {}
    objects: list[ShardedObject] = []
    for leaf_name, leaf in model.sharded_state_dict().items():
        if isinstance(leaf, ShardedObject):
            objects.append(leaf)
        elif isinstance(leaf, ShardedTensor | ShardedTensorFactory):
            weights[leaf_name] = leaf
    of_key: dict[str, list[torch.dtype]] = defaultdict(list)
    for leaf_name, leaf in weights.items():
        of_key[leaf.key].append(dtype_of(names[leaf_name]))
    dtypes = {key: reduce(torch.promote_types, found) for key, found in of_key.items()}
    parameters = [
        Parameter(names[leaf_name], tuple(leaf.data.shape), leaf, dtypes[leaf.key])
        for leaf_name, leaf in weights.items()
    ]
    return parameters, objects


def write_release(
    root: Path,
    parameters: Sequence[Parameter],
    objects: Sequence[ShardedObject],
    *,
    value_of: Callable[[Parameter], torch.Tensor],
    stored: Callable[[Parameter, torch.Tensor], list[tuple[int, int, Segment]]],
    model_shape: Mapping[str, Any],
    made_from: Sequence[str],
    num_threads: int = 1,
) -> Path:
    """Write the checkpoint "release" below `root` and point the tracker at it; returns its directory.

    Args:
        root: checkpoint root.
        parameters: all weights.
        objects: what else Megatron expects (empty states of layers).
        value_of: makes a weight, in its dtype; may be called in any thread.
        stored: says which ranges of a weight's bytes (of one like it, without memory) lie in which files already.
        model_shape: of `arguments.model_shape`.
        made_from: what the weights come from: a cut-off checkpoint of anything else starts over.
        num_threads: that read, change and write.

    Raises:
        UsageError: not enough room on the disk, another process writes the same checkpoint, or there is a "release" by
            the time that it is complete.
    """
    final = iteration_dir(root, "release")
    partial = final.with_name(f".{final.name}.partial")
    parts = _parts(parameters)
    planned = [[(one.name, str(one.dtype), list(one.shape)) for one in part] for part in parts]
    total = sum(one.num_bytes for one in parameters)
    computes_crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # takes longer than writing, and torch.load does not look at it
    try:
        with growing_alone(partial, final, replaces=False):
            plan = [list(made_from), planned]
            take_back(partial, final, plan, replaces=False)
            open_partial(partial, plan)
            todo = [(i, part) for i, part in enumerate(parts) if not _journal(partial, i).is_file()]
            journals = [_journal(partial, i) for i in range(len(parts))]
            _remove_what_is_cut(partial, journals)
            left = sum(one.num_bytes for _, part in todo for one in part)
            check_room(partial, left, f"--save {root}")
            with Bar(f"writing {root.name}", total, done=total - left) as bar:

                def write(numbered: tuple[int, list[Parameter]]) -> int:
                    number, part = numbered
                    _write_part(partial, number, _chunks(part, value_of, stored))
                    return sum(one.num_bytes for one in part)

                run_in_threads(todo, write, num_threads=num_threads, bar=bar)
            written = _write_rest(partial, len(parts), objects, model_shape)
            beside = (*written, PLAN_FILE, manifest.FILE, *(one.name for one in journals))
            files = [path for path in partial.iterdir() if path.is_file() and path.name not in beside]
            write_manifest(partial / manifest.FILE, entries_of(partial, sorted(files)) | written)
            give_name(partial, root, "release", replaces=False)
            for beside_it in (*journals, partial / PLAN_FILE):  # the last, so that a cut before can be gone on with
                (final / beside_it.name).unlink()
    except OSError as error:
        raise said_of_disk(error, partial) from error
    except RuntimeError as error:  # torch.save ends its archive after a write that failed, and complains of that
        if not isinstance(error.__context__, OSError):
            raise
        raise said_of_disk(error.__context__, partial) from error
    finally:
        torch.serialization.set_crc32_options(computes_crc)
    return final


def _parts(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters in their order, as many to a file as fit."""
    parts: list[list[Parameter]] = []
    size = 0
    usual = sum(one.num_bytes for one in parameters) // USUAL_PARTS
    largest = min(PART_BYTES, max(LEAST_PART_BYTES, usual))
    for one in parameters:
        if not parts or size + one.num_bytes > largest:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += one.num_bytes
    return parts


def _part_file(number: int) -> str:
    return f"__0_{number}.distcp"


def _journal(partial: Path, number: int) -> Path:
    """The file that says what is in a part, and that it is complete."""
    return partial / f"part-{number}.pickle"


def _remove_what_is_cut(partial: Path, journals: Sequence[Path]) -> None:
    """Remove what an earlier run has left but for its plan and the parts that are complete: it is written again."""
    complete = {_part_file(i) for i, journal in enumerate(journals) if journal.is_file()}
    kept = complete | {PLAN_FILE} | {journal.name for journal in journals}
    for file in partial.iterdir():
        if file.name not in kept:
            file.unlink()


def _chunks(
    part: Sequence[Parameter],
    value_of: Callable[[Parameter], torch.Tensor],
    stored: Callable[[Parameter, torch.Tensor], list[tuple[int, int, Segment]]],
) -> Iterator[tuple[ShardedTensor, list[Segment] | None]]:
    """What is stored of these weights; where all bytes of one lie in files, without values and with their places."""
    for one in part:
        whole = torch.empty(one.shape, dtype=one.dtype, device="meta")
        described, there = one.chunks(whole), stored(one, whole)
        ranges = [range_in(chunk.data, whole) for chunk in described]
        places = [tiles(there, *place) if place is not None else None for place in ranges]
        if all(place is not None for place in places):
            yield from zip(described, places, strict=True)
            continue
        value = value_of(one)
        if tuple(value.shape) != one.shape:
            raise UsageError(f"{one.name} was made with the shape {list(value.shape)} instead of {list(one.shape)}.")
        for chunk in one.chunks(value):
            yield chunk, None
            chunk.data = None  # Megatron's description outlives this


def _write_part(partial: Path, number: int, chunks: Iterator[tuple[ShardedTensor, list[Segment] | None]]) -> None:
    """Write one file of chunks, see that it is on the disk, then say so."""
    path = partial / _part_file(number)
    entries: list[list[Any]] = []
    with path.open("w+b") as file:
        stream = HashedStream(file)
        for chunk, segments in chunks:
            start = stream.tell()
            shape = (1,) * chunk.prepend_axis_num + tuple(chunk.data.shape)
            if segments is None:
                _save(chunk.data, shape, stream)
            else:
                _save_from(segments, shape, chunk.data.dtype, stream)
            stored = [path.name, start, stream.tell() - start]
            sizes = [list(chunk.global_shape), list(chunk.global_offset), list(shape)]
            entries.append([chunk.key, str(chunk.data.dtype).removeprefix("torch."), *sizes, stored])
    to_disk(path)
    growing = _journal(partial, number).with_suffix(".tmp")
    growing.write_text(json.dumps({"chunks": entries, "file": stream.entry()}))
    to_disk(growing)  # else a crash of the machine may leave the name and not what it says
    growing.rename(_journal(partial, number))


class HashedStream:
    """A file that is written from its beginning to its end, and the checksum of what it was given.

    Args:
        file: open for reading and writing, and empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = manifest.Digest()

    def write(self, data: Buffer) -> int:
        """Write at the end."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def entry(self) -> manifest.Entry:
        """What the manifest says of it."""
        return self._digest.entry()

    def write_around(self, write: Callable[[BinaryIO], None], segments: Sequence[Segment]) -> None:
        """Write an archive with one tensor, whose values are copied from other files.

        Args:
            write: writes it with a hole in the place of the values.
            segments: the values.
        """
        start = self.tell()
        write(self._file)
        self.flush()
        end, handle = self.tell(), self._file.fileno()
        archive = torch._C.PyTorchFileReader(_create_file_view(self._file, start, end - start))
        values = start + archive.get_record_offset("data/0")
        self._digest.update(os.pread(handle, values - start, start))
        behind = copy_into(segments, handle, values, update=self._digest.update)
        self._digest.update(os.pread(handle, end - behind, behind))
        self._file.seek(end)


def _save(data: torch.Tensor, shape: tuple[int, ...], stream: HashedStream) -> None:
    """torch.save of the values at the end of a file."""
    # A view would be written with all that it is a view of.
    whole = data.untyped_storage().nbytes() == data.nbytes and data.is_contiguous()
    torch.save(
        (data if whole else data.clone(memory_format=torch.contiguous_format)).view(shape), cast(BinaryIO, stream)
    )


def _save_from(segments: Sequence[Segment], shape: tuple[int, ...], dtype: torch.dtype, stream: HashedStream) -> None:
    """What torch.save would write at the end of a file, with values that are copied from other files."""

    def write(file: BinaryIO) -> None:
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), file)  # nothing touches that memory, so it takes none

    stream.write_around(write, segments)


def _write_rest(
    partial: Path, num_parts: int, objects: Sequence[ShardedObject], shape: Mapping[str, Any]
) -> dict[str, manifest.Entry]:
    """Write objects and everything that says what is where; returns what the manifest says of the parts."""
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    written: dict[str, manifest.Entry] = {}
    for number in range(num_parts):
        journal = json.loads(_journal(partial, number).read_text())
        written[_part_file(number)] = journal["file"]
        for key, dtype, full, offset, sizes, stored in journal["chunks"]:
            if key not in described:
                properties = TensorProperties(dtype=getattr(torch, dtype))
                described[key] = TensorStorageMetadata(properties, torch.Size(full), [])
            described[key].chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
            where[MetadataIndex(key, torch.Size(offset))] = _StorageInfo(*stored)
    path = partial / _part_file(num_parts)
    with path.open("wb") as stream:
        for one in objects:
            data, start = io.BytesIO(), stream.tell()
            torch.save([one.data], data)  # a list, as Megatron does
            stream.write(data.getbuffer())
            described[one.unique_key] = BytesStorageMetadata()
            where[MetadataIndex(one.unique_key)] = _StorageInfo(path.name, start, stream.tell() - start)
    (partial / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, where)))
    common = {"iteration": "release", "has_rng": False}
    with (partial / "common.pt").open("wb") as stream:  # torch's own does not say that a disk is full
        torch.save(common, stream)
    (partial / "metadata.json").write_text(json.dumps(_BACKENDS))
    (partial / MODEL_SHAPE_FILE).write_text(json.dumps(shape, indent=2) + "\n")
    for file in (*partial.iterdir(), partial):
        to_disk(file)
    return written


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree
