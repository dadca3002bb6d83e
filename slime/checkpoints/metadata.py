"""Read the .metadata of a torch_dist checkpoint (torch.distributed.checkpoint) without running what it names.

The file is a pickle, and unpickling calls whatever a file names. Only the names are allowed that torch 2.13 and
Megatron-Core 0.16 write: descriptions of tensors and of where they lie.
"""

from __future__ import annotations

import gc
import pickle
import re
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.misc import attempt

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
