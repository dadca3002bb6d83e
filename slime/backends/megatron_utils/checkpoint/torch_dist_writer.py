"""Write the weights of a Megatron model as a torch_dist checkpoint without ever holding the model.

The model is built without memory: Megatron itself says how each parameter is called and cut in the checkpoint. The
values are asked for one parameter at a time (`HfWeights` has those of an HF checkpoint, by the rule tables of
megatron_to_hf) and written into files of bounded size, by threads. What `iterations.begin_checkpoint` writes of a
model in memory is the same but for the files that it is in. The checksums of the manifest are made of the bytes as
they are handed to the file, so that nothing is read back.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from slime.backends.megatron_utils.checkpoint.iterations import give_name
from slime.backends.megatron_utils.model.model_weights import iter_weights, named_tensors
from slime.backends.megatron_utils.model_provider import build_stage
from slime.checkpoints.paths import (
    MANIFEST_FILE,
    MODEL_SHAPE_FILE,
    Digest,
    Entry,
    entries_of,
    iteration_dir,
    to_disk,
    write_manifest,
)
from slime.config.args import Args
from slime.conversion.writer import check_room, growing, progress, run_in_threads
from slime.models.families import family_of_args
from slime.models.layouts import TensorShape
from slime.utils.errors import UsageError
from slime.utils.misc import chunks_of_size
from slime.weights.names import left_over

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from slime.conversion.reader import SafetensorsReader

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
    model_shape: Mapping[str, Any],
    num_threads: int = 1,
) -> Path:
    """Write the checkpoint "release" below `root` and point the tracker at it; returns its directory.

    Args:
        root: checkpoint root.
        parameters: all weights.
        objects: what else Megatron expects (empty states of layers).
        value_of: makes a weight, in its dtype; may be called in any thread.
        model_shape: of `arguments.model_shape`.
        num_threads: that read, change and write.

    Raises:
        UsageError: not enough room on the disk, another process writes the same checkpoint, or there is a "release" by
            the time that it is complete.
    """
    final = iteration_dir(root, "release")
    partial = final.with_name(f".{final.name}.partial")
    total = sum(one.num_bytes for one in parameters)
    written: dict[str, Part] = {}
    with growing(partial), _without_crc32(), progress(f"writing {root.name}", total) as bar:
        check_room(partial, total, f"--save {root}")

        def write(part: tuple[int, list[Parameter]]) -> int:
            path = partial / _part_file(part[0])
            written[path.name] = write_part(path, part[1], value_of)
            return sum(one.num_bytes for one in part[1])

        parts = _parts(parameters)
        run_in_threads(enumerate(parts), write, num_threads=num_threads, bar=bar)
        _write_rest(partial, [written[_part_file(number)] for number in range(len(parts))], objects, model_shape)
        entries = {name: part.entry for name, part in written.items()}
        others = [path for path in partial.iterdir() if path.name not in entries]
        write_manifest(partial / MANIFEST_FILE, entries_of(partial, sorted(others)) | entries)
        give_name(partial, root, "release", replaces=False)
    return final


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the checksums of torch.save, which take longer than writing and which torch.load does not look at."""
    computes_crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    except RuntimeError as error:  # torch.save ends its archive after a write that failed, and complains of that
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from error
    finally:
        torch.serialization.set_crc32_options(computes_crc)


def _parts(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters in their order, as many to a file as fit."""
    usual = sum(one.num_bytes for one in parameters) // USUAL_PARTS
    largest = min(PART_BYTES, max(LEAST_PART_BYTES, usual))
    return list(chunks_of_size(parameters, largest, lambda one: one.num_bytes))


def _part_file(number: int) -> str:
    return f"__0_{number}.distcp"


@dataclass(frozen=True)
class Part:
    """One file that is written.

    Attributes:
        chunks: key, dtype, shape of the whole, offset in it, shape, place in the file.
        entry: what the manifest says of it.
    """

    chunks: list[tuple[str, torch.dtype, Sequence[int], Sequence[int], Sequence[int], _StorageInfo]]
    entry: Entry


def write_part(path: Path, part: Sequence[Parameter], value_of: Callable[[Parameter], torch.Tensor]) -> Part:
    """Write one file of weights, and see that it is on the disk."""
    chunks = []
    with path.open("wb") as file:
        stream = HashedStream(file)
        for one in part:
            value = value_of(one)
            if tuple(value.shape) != one.shape:
                raise UsageError(f"{one.name} was made with shape {list(value.shape)} instead of {list(one.shape)}.")
            for chunk in one.chunks(value):
                start, shape = stream.tell(), (1,) * chunk.prepend_axis_num + tuple(chunk.data.shape)
                save_tensor(chunk.data, shape, stream)
                place = _StorageInfo(path.name, start, stream.tell() - start)
                chunks.append((chunk.key, chunk.data.dtype, chunk.global_shape, chunk.global_offset, shape, place))
                chunk.data = None  # Megatron's description outlives this
    to_disk(path)
    return Part(chunks, stream.entry())


class HashedStream(Digest):
    """A file that is written from its beginning to its end, and the checksum of what it was given.

    Args:
        file: open for writing, and empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.flush, self.tell = file.flush, file.tell

    def write(self, data: Buffer) -> int:
        """Write at the end."""
        self.update(data)
        return self._file.write(data)


def save_tensor(data: torch.Tensor, shape: tuple[int, ...], stream: HashedStream) -> None:
    """torch.save of the values at the end of a file."""
    # A view would be written with all that it is a view of.
    whole = data.untyped_storage().nbytes() == data.nbytes and data.is_contiguous()
    torch.save(
        (data if whole else data.clone(memory_format=torch.contiguous_format)).view(shape), cast(BinaryIO, stream)
    )


def _write_rest(
    partial: Path, parts: Sequence[Part], objects: Sequence[ShardedObject], shape: Mapping[str, Any]
) -> None:
    """Write objects and everything that says what is where."""
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for key, dtype, full, offset, sizes, place in itertools.chain.from_iterable(part.chunks for part in parts):
        entry = described.setdefault(key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(full), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
        where[MetadataIndex(key, torch.Size(offset))] = place
    path = partial / _part_file(len(parts))
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


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


EMBEDDING = "embedding.word_embeddings.weight"


def model_without_memory(args: Args) -> Any:
    """The whole model of the flags, with parameters that have shapes and no values."""
    args.perform_initialization = False
    with torch.device("meta"):
        return build_stage(args)


class HfWeights:
    """Weights by the name that they have in Megatron's whole model.

    Args:
        args: derived flags; the family comes from --model-name or --hf-checkpoint.
        reader: of the HF checkpoint.
        dtypes: HF name -> dtype to train in.
    """

    def __init__(self, args: Args, reader: SafetensorsReader, dtypes: Mapping[str, torch.dtype]) -> None:
        self._args, self._reader, self._dtypes = args, reader, dtypes
        self._family, self._infos = family_of_args(args), reader.infos()

    def hf_names(self, name: str) -> tuple[str, ...]:
        """The HF tensors that make up a weight."""
        return self._family.find(name, self._args.num_layers)[1]

    def dtype_of(self, name: str) -> torch.dtype:
        """The narrowest dtype that holds its HF tensors exactly; one that is missing does not count here."""
        found = [self._dtypes[hf_name] for hf_name in self.hf_names(name) if hf_name in self._dtypes]
        return reduce(torch.promote_types, found) if found else torch.float32

    def rows_of(self, name: str) -> int | None:
        """Rows of the one HF tensor of a weight; None where the checkpoint has none."""
        (hf_name,) = self.hf_names(name)
        return self._infos[hf_name].shape[0] if hf_name in self._infos else None

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Compare names and shapes, by the headers alone, before anything is written.

        Raises:
            UsageError: everything that is missing, of another shape, or left over.
        """
        problems: list[str] = []
        used: set[str] = set()
        for one in parameters:
            names = self.hf_names(one.name)
            used.update(names)
            if missing := [name for name in names if name not in self._infos]:
                problems.append(f"{self._root} has no tensor {', '.join(missing)}, of which {one.name} is made.")
                continue
            given = [self._infos[name].shape for name in names]
            if (shape := self._shape_in_megatron(one.name, given)) != one.shape:
                problems.append(
                    f"{self._root}: {', '.join(names)} of shape {', '.join(str(list(one)) for one in given)} make a "
                    f"{one.name} of shape {shape and list(shape)}, the flags describe {list(one.shape)}."
                )
        if left := left_over(Path(self._root), self._infos, used, self._args.mtp_num_layers or 0):
            problems.append(left)
        if problems:
            more = [f"... and {len(problems) - 5} more of the kind."] if len(problems) > 5 else []
            raise UsageError(problems[:5] + more)

    def value_of(self, one: Parameter) -> torch.Tensor:
        """The full weight, in its dtype.

        Raises:
            UsageError: its HF tensors cannot be read.
        """
        rule, names = self._family.find(one.name, self._args.num_layers)
        tensors = [self._reader.get(name).to(one.dtype) for name in names]
        return rule.layout.to_megatron(tensors, TensorShape.of(self._args))

    @property
    def _root(self) -> str:
        return str(self._args.hf_checkpoint)

    def _shape_in_megatron(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """What a weight of tensors with these shapes is like; None where they do not go together."""
        layout = self._family.find(name, self._args.num_layers)[0].layout
        try:
            return tuple(
                layout.to_megatron(
                    [torch.empty(one, device="meta") for one in shapes], TensorShape.of(self._args)
                ).shape
            )
        except (RuntimeError, ValueError):
            return None


def check_vocabulary(args: Args, weights: HfWeights) -> None:
    """Compare the vocabulary of the flags with the rows of the embedding.

    Raises:
        UsageError: they differ; says which --vocab-size fits.
    """
    rows = weights.rows_of(EMBEDDING)
    if rows is not None and rows != args.vocab_size:
        raise UsageError(
            f"--vocab-size {args.vocab_size}, but the embedding of {args.hf_checkpoint} has {rows} rows; give "
            f"--vocab-size {rows} (what --make-vocab-size-divisible-by adds comes on top)."
        )
