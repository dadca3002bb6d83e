"""Read single tensors out of an HF checkpoint directory, sharded or not, without loading the rest.

It knows the file layout (model.safetensors, or shards with an index) and nothing about models. What is stored in fp8
it gives back as the weight that it stands for (slime.utils.fp8_format), and experts that are stored as one tensor one
by one (slime.utils.fused_experts).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from slime.utils.conversion.file_copy import Segment
from slime.utils.conversion.raw_tensors import RawTensors, TensorInfo
from slime.utils.errors import UsageError
from slime.utils.fp8 import E4M3, dequantize
from slime.utils.fp8_format import BLOCK_SUFFIX, TENSOR_SUFFIX, Fp8Format, fp8_format_of
from slime.utils.fused_experts import is_fused, place_of, single_names


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
        """Names of all tensors, fused experts one by one; scales belong to the weight that they scale."""
        stored = [name for name in self._file_of if not self._is_scale(name)]
        return [name for one in stored for name in self._stands_for(one)]

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the dtype it has in the file; fp8 is multiplied by its scales, in fp32.

        Raises:
            UsageError: when the checkpoint has no tensor of that name, or no scales for one in fp8.
        """
        tensor = self._read(name)
        if tensor.dtype != E4M3:
            return tensor
        fmt = self._format
        if name + BLOCK_SUFFIX in self._file_of and fmt is not None and fmt.block_size:
            return dequantize(tensor, self._read(name + BLOCK_SUFFIX), fmt.block_size)
        if name + TENSOR_SUFFIX in self._file_of:
            return dequantize(tensor, self._read(name + TENSOR_SUFFIX), None)
        raise UsageError(
            f"{self._root}: {name} is in fp8, and there are no scales of it that the quantization_config of "
            "config.json says; is it the config.json of this checkpoint?"
        )

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every tensor in its file, from the files' headers."""
        return {name: info.dtype for name, info in self.infos().items()}

    def infos(self) -> dict[str, TensorInfo]:
        """Dtype in its file and shape of every tensor, from the files' headers."""
        found: dict[str, TensorInfo] = {}
        for stored in self._file_of:
            if not self._is_scale(stored):
                dtype, shape = self._raw.info(stored)
                found |= {name: TensorInfo(dtype, _shape_of(name, stored, shape)) for name in self._stands_for(stored)}
        return found

    def segment(self, name: str) -> Segment | None:
        """Where the bytes of a tensor are, if they are stored as `get` gives them."""
        if name not in self._file_of or self._raw.info(name).dtype == E4M3:
            return None
        return self._raw.segment(name)

    @cached_property
    def _format(self) -> Fp8Format | None:
        return fp8_format_of(self._root)

    def _is_scale(self, name: str) -> bool:
        suffix = next((s for s in (BLOCK_SUFFIX, TENSOR_SUFFIX) if name.endswith(s)), None)
        return suffix is not None and name.removesuffix(suffix) in self._file_of

    def _stands_for(self, stored: str) -> list[str]:
        """The names of the tensors that one in a file holds."""
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
