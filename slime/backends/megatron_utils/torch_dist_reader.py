"""Read full Megatron parameters out of a torch_dist checkpoint, one process, no Megatron.

It knows how Megatron lays a GPT out in such a checkpoint (layers stacked, norms under the names that
TransformerEngine gives them) and nothing about HF.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.utils.errors import UsageError

# The norms have the names of TransformerEngine's fused layers, so that models with and without it share checkpoints.
_STORED_AS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYERS = re.compile(r"decoder\.layers\.(?!\d)(.+)")


class TorchDistReader:
    """Parameters of one checkpoint directory (an iter_* or release directory).

    Raises:
        UsageError: when it holds no torch_dist checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        if not (Path(directory) / ".metadata").is_file():
            raise UsageError(f"{directory} holds no torch_dist checkpoint (no .metadata file).")
        self._directory = Path(directory)
        stored = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
        self._tensors = {
            key: entry
            for key, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
        }

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (global Megatron name, full tensor): "decoder.layers.3.mlp.linear_fc2.weight", [H, F]."""
        for key, entry in self._tensors.items():
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            torch_checkpoint.load({key: tensor}, storage_reader=FileSystemReader(str(self._directory)), no_dist=True)
            match = _LAYERS.fullmatch(key)
            if match is None:
                yield key, tensor
                continue
            name = _STORED_AS.get(match.group(1), match.group(1))
            for layer, part in enumerate(tensor):
                yield f"decoder.layers.{layer}.{name}", part
