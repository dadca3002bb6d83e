"""Read single tensors out of an HF checkpoint directory, sharded or not, without loading the rest.

It knows the file layout (model.safetensors, or shards with an index) and nothing about models. What is stored in fp8
or int4 it gives back as the weight that it stands for (slime.weights.formats), and experts that are
stored as one tensor one by one (slime.weights.names).
"""

from __future__ import annotations

import json
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from slime.utils.conversion.file_copy import Segment
from slime.utils.conversion.raw_tensors import RawTensors, TensorInfo
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
from slime.weights.fp8 import E4M3, dequantize
from slime.weights.int4 import dequantize_groups, unpack
from slime.weights.names import is_fused, place_of, single_names


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

    def identity(self) -> list[str]:
        """What tells the checkpoint's files from others at the same place."""
        return self._raw.identity()

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

    def segment(self, name: str) -> Segment | None:
        """Where the bytes of a tensor are, if they are stored as `get` gives them."""
        if name not in self._file_of or self._raw.info(name).dtype == E4M3:
            return None
        return self._raw.segment(name)

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
