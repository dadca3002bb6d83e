"""Tensors of a GGUF file as the values that they stand for, a few rows at a time.

The gguf package dequantises in float32 and needs that twice; rows are made in pieces, so that of a large tensor only
what is returned is whole. It knows no names of models.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy
import torch

from slime.utils.errors import UsageError

PIECE_BYTES = 32 * 1024**2
"""Of the float32 values that are made at a time."""


class GgufFile:
    """One file.

    Args:
        path: of the file.
        flag: that named it, for the error.

    Raises:
        UsageError: it is cut off, or none of GGUF.
    """

    def __init__(self, path: Path, *, flag: str = "--gguf") -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)  # maps every tensor
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            OverflowError,
            MemoryError,
        ) as error:  # gguf's and numpy's
            raise UsageError(f"{flag} {path} is cut off, or no GGUF file ({error}); download it again.") from error
        self._reader.fields.clear()  # of a vocabulary: hundreds of bytes for each token
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor, as torch has it."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str, dtype: torch.dtype, *, expert: int | None = None) -> torch.Tensor:
        """The values.

        Args:
            name: of a tensor [..., K].
            dtype: of the result.
            expert: take tensor[expert] alone.
        """
        tensor, shape = self.tensors[name], self.shape(name)
        data = tensor.data if expert is None else tensor.data[expert]
        shape = shape if expert is None else shape[1:]
        rows, columns = data.reshape(-1, data.shape[-1]), shape[-1]
        values, step = torch.empty((len(rows), columns), dtype=dtype), max(1, PIECE_BYTES // (4 * columns))
        for start in range(0, len(rows), step):
            values[start : start + step] = self._dequantized(rows[start : start + step], tensor.tensor_type)
        return values.reshape(shape)

    def _dequantized(self, rows: Any, kind: Any) -> torch.Tensor:
        """float32 values of stored rows; what was read of the file no longer counts as this process's memory."""
        from gguf import dequantize

        found = torch.from_numpy(
            numpy.require(dequantize(rows, kind), requirements="W")
        )  # a view of the file is not W
        self._reader.data._mmap.madvise(mmap.MADV_DONTNEED)
        return found
