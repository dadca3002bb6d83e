"""Tensors of an HF directory as they are in its files: read with plain reads, by one thread or many.

Files are not mapped into memory: what was read leaves nothing behind but the tensor, and a file that ends too early is
an error with its name instead of a killed process. It knows no names of models and no quantisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slime.utils.conversion.file_copy import Segment
from slime.utils.errors import UsageError
from slime.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, Header, check_names, read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls a dtype -> the dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorInfo(NamedTuple):
    """Dtype and shape of a tensor, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


class RawTensors:
    """The stored tensors of one HF directory by name.

    Args:
        path: an HF directory.
        flag: that named it, for error sentences.
        files: its files of weights, where it has no index yet.

    Raises:
        UsageError: it has no safetensors, a file is missing, cut off or no safetensors, or lacks what the index says;
            names the file.
    """

    def __init__(self, path: str | Path, *, flag: str = "the checkpoint", files: Sequence[str] | None = None) -> None:
        self.root = Path(path)
        self._flag = flag
        self._headers: dict[str, Header] = {}
        given = None if files is None else {name: file for file in files for name in self._header(file).tensors}
        self.file_of = self._find_files() if given is None else given

    def _find_files(self) -> dict[str, str]:
        index = self.root / INDEX_FILE
        if index.is_file():
            try:
                file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
                check_names(index, file_of.values())
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{index} is no index of safetensors ({error}); download it again.") from error
            return file_of
        if (self.root / SINGLE_FILE).is_file():
            return dict.fromkeys(self._header(SINGLE_FILE).tensors, SINGLE_FILE)
        raise UsageError(
            f"{self._flag} {self.root} holds no {SINGLE_FILE} and no {INDEX_FILE}; download the weights, too, or save "
            "the model with safetensors."
        )

    def check(self) -> None:
        """Look at the headers of all files.

        Raises:
            UsageError: as for the class.
        """
        for file in sorted(set(self.file_of.values())):
            header = self._header(file)
            missing = [name for name, there in self.file_of.items() if there == file and name not in header.tensors]
            if missing:
                raise UsageError(
                    f"{self.root / file} lacks {len(missing)} tensor(s) that {INDEX_FILE} says are in it, such as "
                    f"{missing[0]}; download both again."
                )

    def identity(self) -> list[str]:
        """What tells these files from others at the same place: path, size and time of each."""
        files = [(self.root / file).resolve() for file in sorted(set(self.file_of.values()))]
        return [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor, from its file's header."""
        entry = self._entry(name)
        return TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.info(name).num_bytes for name in self.file_of)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor to the CPU, or the rows [first, behind last] of it.

        Raises:
            UsageError: there is none of that name, or its file is cut off.
        """
        (dtype, shape), file = self.info(name), self.file_of[name]
        start = self._header(file).data_start + self._entry(name)["data_offsets"][0]
        if rows is not None:
            row_bytes = prod(shape[1:]) * dtype.itemsize
            start, shape = start + rows[0] * row_bytes, (rows[1] - rows[0], *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        read_into(tensor, self.root / file, start)
        return tensor

    def segment(self, name: str) -> Segment:
        """Where the bytes of a tensor are."""
        file, (first, behind) = self.file_of[name], self._entry(name)["data_offsets"]
        return Segment(self.root / file, self._header(file).data_start + first, behind - first)

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self.file_of:
            raise UsageError(f"{self.root} has no tensor {name}; is it the checkpoint of another model?")
        file = self.file_of[name]
        entry = self._header(file).tensors.get(name)
        if entry is None:
            raise UsageError(f"{self.root / file} has no tensor {name}, which {INDEX_FILE} says is in it.")
        return entry

    def _header(self, file: str) -> Header:
        if file not in self._headers:
            self._headers[file] = self._checked_header(file)
        return self._headers[file]

    def _checked_header(self, file: str) -> Header:
        path = self.root / file
        try:
            header, size = read_header(path), path.stat().st_size
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}); download it again.") from error
        except (ValueError, MemoryError, OverflowError) as error:
            raise UsageError(f"{path} is no safetensors file, or cut off ({error}); download it again.") from error
        if size < header.file_bytes:
            raise UsageError(f"{path} is cut off: {size} bytes instead of {header.file_bytes}; download it again.")
        unknown = sorted({str(one["dtype"]) for one in header.tensors.values()} - DTYPES.keys())
        if unknown:
            raise UsageError(f"{path} holds tensors of {', '.join(unknown)}; known are {', '.join(DTYPES)}.")
        return header


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    # Not .view(uint8) of the tensor itself: a scalar has no last dimension to be cut.
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def read_into(tensor: torch.Tensor, path: Path, start: int) -> None:
    """Fill a contiguous tensor with the bytes of a file from `start` on.

    Raises:
        UsageError: the file ends before.
    """
    target, done = bytes_of(tensor), 0
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while done < len(target):
            count = stream.readinto(target[done:])
            if not count:
                raise UsageError(f"{path} is cut off: it ends at byte {start + done}; download or write it again.")
            done += count
