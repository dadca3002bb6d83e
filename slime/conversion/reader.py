"""Read single tensors out of an HF checkpoint directory, sharded or not, without loading the rest.

`RawTensors` gives tensors as they are stored, `SafetensorsReader` the weights that they stand for: what is in fp8 or
int4 (slime.weights.formats, int4_format), and experts stored as one tensor one by one (slime.weights.names).
Files are read with plain reads and not mapped into memory: what was read leaves nothing behind but the tensor, and a
file that ends too early is an error with its name instead of a killed process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slime.utils.errors import UsageError
from slime.weights.formats import (
    BLOCK_SUFFIX,
    PACKED,
    SCALE,
    SHAPE,
    TENSOR_SUFFIX,
    ZERO,
    Fp8Format,
    Int4Format,
    format_of_checkpoint,
)
from slime.weights.names import (
    INDEX_FILE,
    SINGLE_FILE,
    Header,
    check_names,
    is_fused,
    place_of,
    read_header,
    single_names,
)
from slime.weights.quantization import E4M3, dequantize, dequantize_groups, unpack

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
}  # safetensors' name of a dtype -> the dtype
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

    Raises:
        UsageError: it has no safetensors, a file is missing, cut off or no safetensors, or lacks what the index says;
            names the file.
    """

    def __init__(self, path: str | Path, *, flag: str = "the checkpoint") -> None:
        self.root = Path(path)
        self._flag = flag
        self._headers: dict[str, Header] = {}
        self.file_of = self._find_files()

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
        (dtype, shape), (file, start) = self.info(name), self.place(name)
        if rows is not None:
            row_bytes = prod(shape[1:]) * dtype.itemsize
            start, shape = start + rows[0] * row_bytes, (rows[1] - rows[0], *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        read_into(tensor, file, start)
        return tensor

    def place(self, name: str) -> tuple[Path, int]:
        """The file of a tensor, and the byte at which it begins there."""
        entry, file = self._entry(name), self.file_of[name]
        return self.root / file, self._header(file).data_start + entry["data_offsets"][0]

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


class SafetensorsReader:
    """Tensors of one HF checkpoint by name; several threads may read.

    Args:
        path: an HF directory.
        flag: that named it, for error sentences.

    Raises:
        UsageError: when the directory holds no safetensors, or files that are not whole; names the file.
    """

    def __init__(self, path: str | Path, *, flag: str = "the checkpoint") -> None:
        self._root = Path(path)
        self._raw = RawTensors(path, flag=flag)
        self._raw.check()
        self._file_of = self._raw.file_of

    def names(self) -> list[str]:
        """Names of all tensors, fused experts one by one; scales and shapes belong to their weight."""
        stored = [name for name in self._file_of if not self._is_scale(name)]
        return [name for one in stored for name in self._stands_for(one)]

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the dtype it has in the file; fp8 is multiplied by its scales, in fp32.

        int4 is multiplied by its scales in fp32, too, and returned in their dtype.

        Raises:
            UsageError: when the checkpoint has no tensor of that name, or no scales for one in fp8.
        """
        if module := self._int4_module(name):
            return self._unpacked(module)
        tensor = self._read(name)
        if tensor.dtype != E4M3:
            return tensor
        scales, block_size = self._fp8_scales(name, tuple(tensor.shape))
        return dequantize(tensor, self._read(scales), block_size)

    def get_rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Read the rows [first, end) of a tensor; no others are read where it is stored as it is."""
        if name not in self._file_of or self._raw.info(name).dtype == E4M3:
            return self.get(name)[first:end]
        return self._raw.read(name, (first, end))

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every tensor in its file, from the files' headers."""
        return {name: info.dtype for name, info in self.infos().items()}

    def infos(self) -> dict[str, TensorInfo]:
        """Dtype in its file and shape of every tensor, from the files' headers.

        Raises:
            UsageError: one is quantised, and its scales are missing or of another shape.
        """
        found: dict[str, TensorInfo] = {}
        for stored in self._file_of:
            if not self._is_scale(stored):
                dtype, shape = self._info(stored)
                found |= {name: TensorInfo(dtype, _shape_of(name, stored, shape)) for name in self._stands_for(stored)}
        return found

    @cached_property
    def _format(self) -> Fp8Format | None:
        fmt = format_of_checkpoint(self._root)
        return fmt if isinstance(fmt, Fp8Format) else None

    @cached_property
    def _int4_format(self) -> Int4Format:
        return Int4Format.of(json.loads((self._root / "config.json").read_text()), where=str(self._root))

    def _int4_module(self, name: str) -> str | None:
        """The module of a weight that is stored in int4, with the dot behind it."""
        module = name.removesuffix("weight")
        return module if module != name and module + PACKED in self._file_of else None

    def _unpacked(self, module: str) -> torch.Tensor:
        self._int4_format.check_order(module, self._file_of, where=str(self._root))
        scales = self._read(module + SCALE)
        groups, size = scales.shape[1], self._int4_format.group_size
        values, zeros = unpack(self._read(module + PACKED), groups * size), None
        if module + ZERO in self._file_of:
            zeros = unpack(self._read(module + ZERO), values.shape[0], dim=0)
        return dequantize_groups(values, scales, size, zeros, scales.dtype)

    def _info(self, stored: str) -> TensorInfo:
        """As `_raw.info`, of what is stored in int4 that of the weight; looks at the shapes of scales."""
        info = self._raw.info(stored)
        if info.dtype == E4M3 and is_fused(stored):
            raise UsageError(
                f"{self._root}: {stored} holds all experts of a layer in fp8, which are read one by one alone; make "
                "the checkpoint with tools/convert_hf_to_fp8.py, or use the unquantised one."
            )
        if info.dtype == E4M3:
            self._fp8_scales(stored, info.shape)
        if not stored.endswith("." + PACKED):
            return info
        module, fmt = stored.removesuffix(PACKED), self._int4_format
        fmt.check_order(module, self._file_of, where=str(self._root))
        scales = self._raw.info(module + SCALE)
        zeros = self._raw.info(module + ZERO).shape if module + ZERO in self._file_of else None
        fmt.check_stored(module, info.shape, scales.shape, zeros, where=str(self._root))
        return TensorInfo(scales.dtype, (scales.shape[0], scales.shape[1] * fmt.group_size))

    def _fp8_scales(self, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, int] | None]:
        """The tensor with the scales of one in fp8, and the blocks that they are of; None: it is one scale."""
        block = self._format.block_size if self._format is not None else None
        if block is not None and name + BLOCK_SUFFIX in self._file_of:
            scales = name + BLOCK_SUFFIX
            wanted = (*shape[:-2], *(-(-size // of) for size, of in zip(shape[-2:], block, strict=True)))
            if (found := self._raw.info(scales).shape) != wanted:
                raise UsageError(
                    f"{self._root}: {scales} has the shape {list(found)}, and blocks of {block[0]} x {block[1]} make "
                    f"{list(wanted)} of {name} {list(shape)}; is it the config.json of this checkpoint?"
                )
            return scales, block
        if name + TENSOR_SUFFIX not in self._file_of:
            raise UsageError(
                f"{self._root}: {name} is in fp8, and there are no scales of it that the quantization_config of "
                "config.json says; is it the config.json of this checkpoint?"
            )
        if prod(found := self._raw.info(name + TENSOR_SUFFIX).shape) != 1:
            raise UsageError(
                f"{self._root}: {name}{TENSOR_SUFFIX} has the shape {list(found)}, and is not one number for all of "
                f"{name}; make the checkpoint with tools/convert_hf_to_fp8.py, or use the unquantised one."
            )
        return name + TENSOR_SUFFIX, None

    def _is_scale(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        if part in (SCALE, SHAPE, ZERO) and f"{module}.{PACKED}" in self._file_of:
            return True
        suffix = next((s for s in (BLOCK_SUFFIX, TENSOR_SUFFIX) if name.endswith(s)), None)
        return suffix is not None and name.removesuffix(suffix) in self._file_of

    def _stands_for(self, stored: str) -> list[str]:
        """The names of the tensors that one in a file holds."""
        if stored.endswith("." + PACKED):
            return [stored.removesuffix(PACKED) + "weight"]
        return single_names(stored, self._raw.info(stored).shape[0]) if is_fused(stored) else [stored]

    def _read(self, name: str) -> torch.Tensor:
        place = place_of(name)
        if place is not None and name not in self._file_of and place.fused in self._file_of:
            (dtype, shape), rows = self._raw.info(place.fused), (place.expert, place.expert + 1)
            if place.expert < shape[0] and dtype != E4M3:
                return self._raw.read(place.fused, rows)[0].chunk(place.parts)[place.part].contiguous()
        return self._raw.read(name)


def _shape_of(name: str, stored: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor that one of that shape in a file is, or stands for."""
    place = place_of(name) if name != stored else None
    return shape if place is None else (shape[1] // place.parts, *shape[2:])


def read_hf_config(path: str | Path, *, flag: str) -> dict[str, Any]:
    """Return the config.json of `path`.

    Raises:
        UsageError: there is none, or it is no JSON object; names the flag.
    """
    file = Path(path) / "config.json"
    return read_config_file(file, missing=f"{flag} {path} is no HF checkpoint: it has no config.json.")


def read_config_file(file: Path, *, missing: str) -> dict[str, Any]:
    """Return the config in a file.

    Raises:
        UsageError: `missing` where there is no file, or it is no JSON object.
    """
    if not file.is_file():
        raise UsageError(missing)
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}); download it again.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object; is it the config of a model?")
    return config


def config_dtype(hf_config: dict[str, object]) -> torch.dtype | None:
    """Return the dtype that a config.json names (`dtype`, before transformers 5 `torch_dtype`), or None."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return getattr(torch, str(name).removeprefix("torch.")) if name else None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that is not quantised; its language model may have one of its own."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain
