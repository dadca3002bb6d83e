"""Read single tensors out of an HF checkpoint directory, sharded or not, without loading the rest.

It knows the file layout (model.safetensors, or shards with an index) and nothing about models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slime.utils.errors import UsageError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        """Names of all tensors."""
        return list(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the dtype it has in the file.

        Raises:
            UsageError: when the checkpoint has no tensor of that name.
        """
        if name not in self._file_of:
            raise UsageError(f"{self._root} has no tensor {name}; is it the checkpoint of another model?")
        return self._file(self._file_of[name]).get_tensor(name)

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every tensor, from the files' headers."""
        return {name: _DTYPES[self._file(file).get_slice(name).get_dtype()] for name, file in self._file_of.items()}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(str(self._root / name), framework="pt", device="cpu")
        return self._open[name]
