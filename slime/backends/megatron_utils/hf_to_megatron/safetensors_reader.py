"""Read single tensors out of an HF checkpoint directory, sharded or not, without loading the rest.

It knows the file layout (model.safetensors, or shards with an index) and nothing about models. What is stored in fp8
it gives back as the weight that it stands for (slime.utils.fp8_format), and experts that are stored as one tensor one
by one (slime.utils.fused_experts).
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slime.utils.errors import UsageError
from slime.utils.fp8 import E4M3, dequantize
from slime.utils.fp8_format import BLOCK_SUFFIX, TENSOR_SUFFIX, Fp8Format, fp8_format_of
from slime.utils.fused_experts import is_fused, place_of, single_names
from slime.utils.safetensors_files import INDEX_FILE, SINGLE_FILE

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": E4M3}


class SafetensorsReader:
    """Tensors of one HF checkpoint by name.

    Raises:
        UsageError: when the directory holds no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path)
        index = self._root / INDEX_FILE
        self._open: dict[str, Any] = {}
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self._root / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise UsageError(f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}; save the model with safetensors.")

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
        return {
            name: _DTYPES[self._slice(stored).get_dtype()]
            for stored in self._file_of
            if not self._is_scale(stored)
            for name in self._stands_for(stored)
        }

    @cached_property
    def _format(self) -> Fp8Format | None:
        return fp8_format_of(self._root)

    def _is_scale(self, name: str) -> bool:
        suffix = next((s for s in (BLOCK_SUFFIX, TENSOR_SUFFIX) if name.endswith(s)), None)
        return suffix is not None and name.removesuffix(suffix) in self._file_of

    def _stands_for(self, stored: str) -> list[str]:
        """The names of the tensors that one in a file holds."""
        return single_names(stored, self._slice(stored).get_shape()[0]) if is_fused(stored) else [stored]

    def _slice(self, stored: str) -> Any:
        """Header and rows of a tensor in a file."""
        return self._file(self._file_of[stored]).get_slice(stored)

    def _read(self, name: str) -> torch.Tensor:
        place = place_of(name)
        if place is not None and name not in self._file_of and place.fused in self._file_of:
            rows: torch.Tensor = self._slice(place.fused)[place.expert : place.expert + 1]
            if rows.numel() and rows.dtype != E4M3:
                return rows[0].chunk(place.parts)[place.part].contiguous()
        if name not in self._file_of:
            raise UsageError(f"{self._root} has no tensor {name}; is it the checkpoint of another model?")
        return self._file(self._file_of[name]).get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(str(self._root / name), framework="pt", device="cpu")
        return self._open[name]
