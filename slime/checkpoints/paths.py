"""What kind of checkpoint a directory is, where an iteration lies inside it, and what its files were when written.

It reads names and small files; it opens no tensors. Layout of
a Megatron checkpoint root: `latest_checkpointed_iteration.txt` (a number, or the word "release"), `iter_0000012/` or
`release/`, and `rollout/` with the states of the data source.

The manifest, a file beside a checkpoint's files, has their sizes and checksums (xxh3). A checkpoint that was cut,
changed or half copied is found out before it is loaded. Checksums are no signature: they find faults, not forgeries.
A file that the manifest does not name is not looked at.

The .metadata of a torch_dist checkpoint (torch.distributed.checkpoint) is a pickle, and unpickling calls whatever a
file names. Only the names are allowed that torch 2.13 and Megatron-Core 0.16 write: descriptions of tensors and of
where they lie.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from slime.utils.errors import UsageError
from slime.utils.misc import attempt, on_error

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MODEL_SHAPE_FILE = "model_shape.json"
STATE_MANIFEST = "data_source.manifest.json"
"""In an iteration: the manifest of the data source's state that belongs to it, with paths from the iteration's."""
RELEASE = "release"
"""Name of a checkpoint that holds weights only and belongs to no iteration (a converted HF model)."""


def classify_checkpoint(path: str | Path | None) -> Literal["megatron", "hf"] | None:
    """Return "megatron" for a root with a tracker file, "hf" for a directory with config.json, else None."""
    if path is None:
        return None
    if os.path.isfile(Path(path) / TRACKER_FILE):  # Path.is_file raises where the name is too long
        return "megatron"
    return "hf" if os.path.isfile(Path(path) / "config.json") else None


def read_tracker(path: str | Path) -> str | None:
    """Return what the tracker file of a checkpoint root says ("12" or "release"), or None if there is none.

    Raises:
        UsageError: when the file holds neither a number nor "release".
    """
    tracker = Path(path) / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if text != RELEASE and not re.fullmatch(r"\d+", text):
        raise UsageError(
            f"{tracker} holds {text!r}, neither an iteration number nor 'release'; "
            "write the number of an existing iter_* directory."
        )
    return text


def latest_iteration(path: str | Path) -> int | None:
    """Return the newest iteration of a checkpoint root; None for a release and for no Megatron checkpoint at all."""
    text = read_tracker(path)
    return None if text in (None, RELEASE) else int(text)


def iteration_dir(root: str | Path, iteration: int | str) -> Path:
    """Return the directory of one iteration: `<root>/iter_0000012`, or `<root>/release` for the word "release"."""
    return Path(root) / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")


def state_path(root: str | Path, rollout_id: int) -> Path:
    """Where the state of the data source after a rollout lies under --save / --load."""
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def manifest_of_state(path: Path) -> Path:
    """Where the size and the checksum of a state are noted."""
    return path.with_suffix(".manifest.json")


def resolve_checkpoint_dir(root: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """Return (directory, iteration) of what a load from `root` would read; the iteration of a release is None.

    Args:
        root: a Megatron checkpoint root.
        step: take this iteration instead of the newest.

    Raises:
        UsageError: when there is no such checkpoint; names the iterations that exist.
    """
    wanted: int | str | None = step if step is not None else read_tracker(root)
    if wanted is None:
        raise UsageError(f"{root} is no Megatron checkpoint: it has no {TRACKER_FILE}.")
    directory = iteration_dir(root, wanted)
    if not directory.is_dir():
        there = sorted(p.name for p in Path(root).glob("iter_*")) + [p.name for p in Path(root).glob(RELEASE)]
        raise UsageError(f"{directory} does not exist; {root} holds {', '.join(there) or 'no checkpoint'}.")
    return directory, None if wanted == RELEASE else int(wanted)


def saved_plan(path: str | Path, step: int | None) -> dict[str, Any] | None:
    """What a checkpoint says of its LoRA adapters (`LoraPlan.as_json`); None where it holds a whole model.

    Args:
        path: a Megatron checkpoint root, or an HF directory.
        step: iteration of a root; None takes the one that its tracker names.

    Raises:
        UsageError: there is no such iteration.
    """
    if classify_checkpoint(path) != "megatron":
        return None
    return plan_in(resolve_checkpoint_dir(path, step)[0])


def adapters_in(path: str | None, step: int | None) -> dict[str, Any] | None:
    """`saved_plan`, and None where that cannot be said: what is wrong then is said elsewhere."""
    try:
        return None if path is None else saved_plan(path, step)
    except (UsageError, OSError, ValueError):
        return None


def plan_in(directory: Path) -> dict[str, Any] | None:
    """The same of the directory of one iteration."""
    return _shape_in(directory).get("lora")


def saved_shape(path: str | Path | None, step: int | None) -> dict[str, Any] | None:
    """Read the model's shape from a checkpoint (`MODEL_SHAPE_FILE`); None if the path holds no checkpoint of a run.

    Args:
        path: a checkpoint root, or anything else.
        step: iteration of a root; None takes the one that its tracker names.

    Raises:
        UsageError: there is no such iteration, or it is not to be trusted.
    """
    if path is None or classify_checkpoint(path) != "megatron":
        return None
    directory, _ = resolve_checkpoint_dir(path, step)
    check_names(directory)
    return _shape_in(directory)


def _shape_in(directory: Path) -> dict[str, Any]:
    file = directory / MODEL_SHAPE_FILE
    return dict(json.loads(file.read_text())) if file.is_file() else {}


MANIFEST_FILE = "manifest.json"
Depth = Literal["full", "sizes", "none"]
"""How closely is looked: at sizes and contents, at sizes, not at all."""
Entry = dict[str, Any]
_CHUNK = 1 << 22
_THREADS = 8


def entries_of(root: Path, files: Iterable[Path]) -> dict[str, Entry]:
    """Size and checksum of files below `root`, by their path in it; each is brought to the disk first.

    Raises:
        OSError: a file cannot be read, or not written out.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(threads.map(lambda path: (path.relative_to(root).as_posix(), _entry(path)), files))


class Digest:
    """What a manifest says of a file, made from its bytes as they are written, from the first to the last."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0

    def update(self, data: Any) -> None:
        """Take the next bytes."""
        self._digest.update(data)
        self._num_bytes += memoryview(data).nbytes

    def entry(self) -> Entry:
        """Size and checksum of all of them."""
        return {"bytes": self._num_bytes, "xxh3": self._digest.hexdigest()}


def _entry(path: Path) -> Entry:
    to_disk(path)
    return {"bytes": path.stat().st_size, "xxh3": _checksum(path)}


def to_disk(path: Path) -> None:
    """Have the system write a file, or the entries of a directory, out of its memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write a manifest, which takes its name when it is complete; the paths of `entries` count from its directory.

    Raises:
        OSError: it cannot be written; one that was there stays.
    """
    body = {"files": dict(sorted(entries.items()))}
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    with on_error(lambda: unnamed.unlink(missing_ok=True)):
        with unnamed.open("w") as file:
            json.dump({**body, "xxh3": _of_json(body)}, file, indent=1)
        to_disk(unnamed)
        os.replace(unnamed, path)


def what_is_wrong(path: Path, depth: Depth = "full") -> str | None:
    """The first difference between a manifest and the files, as a sentence's end; None where there is none.

    Args:
        path: of the manifest.
        depth: how closely to look. Checksums are read by several threads at once.
    """
    if depth == "none":
        return None
    try:
        files = _read(path)
        # By the names alone: an iteration may be a link to a place that has another "..".
        places = {Path(os.path.normpath(path.parent / name)): entry for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({type(error).__name__}: {error})"
    for place, entry in places.items():
        if problem := _wrong_size(place, entry["bytes"]):
            return problem
    if depth == "sizes":
        return None
    with ThreadPoolExecutor(_THREADS) as readers:
        problems = readers.map(lambda item: _wrong_contents(*item), places.items())
        return next(filter(None, problems), None)


def _read(path: Path) -> dict[str, Entry]:
    content = json.loads(path.read_bytes().decode())
    files: dict[str, Entry] = content["files"]
    if content["xxh3"] != _of_json({"files": files}):
        raise ValueError("it was changed after it was written")
    return files


def _wrong_size(path: Path, wanted: int) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == wanted else f"{path} has {size} bytes, but {wanted} were written"


def _wrong_contents(path: Path, entry: Entry) -> str | None:
    try:
        found = _checksum(path)
    except OSError as error:
        return f"{path} cannot be read ({error})"
    wanted = entry["xxh3"]
    return None if found == wanted else f"{path} is not what was written (checksum {found}, not {wanted})"


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _of_json(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


FILE = ".metadata"
_DTYPE = re.compile(r"(bfloat|float|complex|u?int|qu?int|bits)\d\w*|bool")
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    # Megatron keeps the plans of all ranks with it.
    *((f"{_DCP}.planner", name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")),
    *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
}
_ENUMERATIONS = {(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.planner", "WriteItemType")}
# A member of an enumeration is its value, or in files of some versions of Python 3.11 (3.11.2) an attribute.
_GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "PurePosixPath")}
_PATHS |= {("pathlib._local", name) for _, name in _PATHS}  # as Python 3.13 calls them


class _Refused(Exception):
    """The file names something else."""


class _Description:
    """Stands for every object of a file of which only the names are looked at."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class _Enumeration(_Description):
    """Stands for an enumeration."""

    def __class_getitem__(cls, _: str) -> _Enumeration:
        return cls()


def _member(kind: object, name: str) -> object:
    """What stands for getattr: a member of an enumeration, and of nothing else."""
    if kind is _Enumeration or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind[name]  # type: ignore[index]
    raise _Refused("builtins.getattr")


def _path(*parts: str) -> PurePosixPath:
    """What stands for the classes of paths: a file could change a class for this whole process."""
    return PurePosixPath(*parts)


class _Names(pickle.Unpickler):
    """Looks at the names alone: nothing is imported, so that no flag's check waits for torch."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return _path
        if (module, name) in _GETATTR:
            return _member
        if (module, name) in _ENUMERATIONS:
            return _Enumeration
        if (module, name) in _ALLOWED or (module == "torch" and _DTYPE.fullmatch(name)):
            return dict if name == "OrderedDict" else _Description
        raise _Refused(f"{module}.{name}")


class _Unpickler(_Names):
    """Makes the objects."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return found if found in (_path, _member) else pickle.Unpickler.find_class(self, module, name)


def check_names(directory: Path) -> None:
    """Look at the names in the .metadata of a checkpoint, where it has one; a damaged one is left to its reader.

    That is for an early error. Only `read_metadata` may read the file afterwards: what is called damaged here may run
    something in another reader.

    Raises:
        UsageError: it names something else than a description of tensors, which loading it would run.
    """
    if (directory / FILE).is_file():
        _load(directory, _Names)


def read_metadata(directory: Path) -> Any:
    """The torch.distributed.checkpoint.metadata.Metadata of a checkpoint.

    Raises:
        UsageError: it is damaged, names something that would be run, or a file outside the checkpoint's directory.
    """
    path = directory / FILE
    metadata, damage = _load(directory, _Unpickler)
    names, no_names = attempt(lambda: {info.relative_path for info in metadata.storage_data.values()})
    if names is None:
        raise UsageError(f"{path} cannot be read ({damage or no_names}); copy it again.") from damage or no_names
    for name in names:  # as text: an object of the file could say one path here and be another
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise UsageError(f"{path} names {name!r}, which is not in its directory: do not trust it.")
    return metadata


def _load(directory: Path, kind: type[_Names]) -> tuple[Any, Exception | SystemExit | None]:
    """(what the file describes, None), or (None, why it is damaged: unpickling what is damaged raises anything)."""
    was_enabled = gc.isenabled()
    gc.disable()  # 100,000 tensors are millions of objects, over which it would go again and again: 0.7 s, not 2.3 s
    try:
        description, damage = attempt(_unpickle, directory / FILE, kind)
    finally:
        if was_enabled:
            gc.enable()
    if isinstance(damage, _Refused):
        raise _refusal(directory, damage) from None
    return description, damage


def _unpickle(path: Path, kind: type[_Names]) -> Any:
    with path.open("rb") as stream:
        return kind(stream).load()


def _refusal(directory: Path, error: _Refused) -> UsageError:
    return UsageError(
        f"{directory / FILE} names {error}, which no description of tensors has, and which loading it would run: do "
        "not trust this checkpoint, or convert it where it was written."
    )
