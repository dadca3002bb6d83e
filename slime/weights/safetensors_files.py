"""The files of an HF checkpoint directory, by their headers: which tensors are where, and whether all of it is there.

It reads names, places and sizes, no weights, and knows nothing about models. Importing it needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class Header:
    """The front of a safetensors file.

    Attributes:
        tensors: name -> {"dtype", "shape", "data_offsets"}, in bytes behind `data_start`.
        metadata: the file's own strings.
        data_start: bytes before the first tensor.
    """

    tensors: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    data_start: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + max((entry["data_offsets"][1] for entry in self.tensors.values()), default=0)


def read_header(file: Path) -> Header:
    """Read the JSON at the front of a safetensors file: 8 bytes of its length, then itself.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:  # before so much memory is asked for
            raise ValueError(f"{file} ends inside its header")
        text = stream.read(length)
    tensors = json.loads(text)
    return Header(tensors, tensors.pop("__metadata__", {}), 8 + length)


def read_index(directory: Path) -> dict[str, Any]:
    """The index: {"metadata": {...}, "weight_map": {name of a tensor: name of its file}}.

    Raises:
        OSError: there is none that could be read.
        ValueError: it is not what it should be.
    """
    index = json.loads((directory / INDEX_FILE).read_text())
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{directory / INDEX_FILE} has no weight_map")
    check_names(directory / INDEX_FILE, index["weight_map"].values())
    return index


def check_names(told_by: Path, names: Iterable[Any]) -> None:
    """Refuse names of files that lie outside the directory of the file that names them.

    Raises:
        ValueError: one is absolute, leads upwards, or is no text.
    """
    for name in set(names):
        if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{told_by} names the file {name!r}, which is not in its directory: do not trust it")


def what_is_wrong(directory: Path) -> str | None:
    """Why not every tensor that a directory's index names can be read from its files; None when all can."""
    try:
        index = read_index(directory)
        for name in sorted(set(index["weight_map"].values())):
            header, size = read_header(directory / name), (directory / name).stat().st_size
            if size != header.file_bytes:
                return f"{directory / name} has {size} bytes instead of {header.file_bytes}"
            missing = [one for one, file in index["weight_map"].items() if file == name and one not in header.tensors]
            if missing:
                return f"{directory / name} lacks {len(missing)} tensors of the index, such as {missing[0]}"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # JSON, but of another form
        return f"{directory} has a damaged header or index ({type(error).__name__}: {error})"
    return None


def files_of(directory: Path) -> Iterator[Path]:
    """The files that the index of a directory names, in order."""
    for name in sorted(set(read_index(directory)["weight_map"].values())):
        yield directory / name
