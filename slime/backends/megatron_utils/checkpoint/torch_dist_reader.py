"""Read Megatron parameters out of a torch_dist checkpoint, one by one, no Megatron.

A tensor of such a checkpoint may stack all layers, and all experts of a layer; of it, only the parts are read that
make up the parameter that was asked for. It knows how Megatron lays a GPT out in such a checkpoint (stacked, norms
under the names that TransformerEngine gives them) and nothing about HF.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from slime.checkpoints.paths import read_metadata
from slime.conversion.reader import TensorInfo
from slime.utils.errors import UsageError

# The norms have the names of TransformerEngine's fused layers, so that models with and without it share checkpoints.
_STORED_AS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_NORM = re.compile(rf"(.*\.)({'|'.join(map(re.escape, _STORED_AS))})")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERTS = ".experts.experts."
# What a run keeps beside the model's weights, and a critic's head.
_NOT_OF_MODEL = ("optimizer.", "rng_state", "opt_param_scheduler")


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: `key`[`index`], for an index over layers, experts, both or neither."""

    key: str
    index: tuple[int, ...]


class TorchDistReader:
    """Parameters of one checkpoint directory (an iter_* or release directory); several threads may read.

    Args:
        directory: with .metadata.
        is_stacked: Megatron wrote it; without, tensors are taken as they are stored.

    Raises:
        UsageError: when it holds no torch_dist checkpoint, or one that is not whole; names the file.
    """

    def __init__(self, directory: str | Path, *, is_stacked: bool = True) -> None:
        self._directory = Path(directory)
        if not (self._directory / ".metadata").is_file():
            raise UsageError(f"{directory} holds no torch_dist checkpoint (no .metadata file).")
        metadata = read_metadata(self._directory)
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_NOT_OF_MODEL)
        }
        self._stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        self._places = {key: _Place(key, ()) for key in self._tensors}
        if is_stacked:
            self._places = dict(itertools.chain.from_iterable(map(self._parts, self._tensors)))
        self._check_files()

    def infos(self) -> dict[str, TensorInfo]:
        """Global Megatron name -> dtype and shape: "decoder.layers.3.mlp.linear_fc2.weight", [H, F]."""
        return {name: self._info(place) for name, place in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """One full parameter."""
        place = self._places[name]
        dtype, shape = self._info(place)
        found: torch.Tensor | None = None
        for chunk in self._tensors[place.key].chunks:
            inside = _overlap(place.index, chunk.offsets, chunk.sizes)
            if inside is None:
                continue
            part = self._load(place.key, tuple(chunk.offsets))[inside]
            if found is None and part.shape == shape:
                return part.to(dtype)
            found = torch.empty(shape, dtype=dtype) if found is None else found
            ahead = len(place.index)
            where = zip(chunk.offsets[ahead:], chunk.sizes[ahead:], strict=True)
            found[tuple(slice(first, first + size) for first, size in where)] = part
        if found is None:
            raise UsageError(f"{self._directory} has no values of {name}; was the saving of it cut off?")
        return found

    def _parts(self, key: str) -> Iterator[tuple[str, _Place]]:
        """The parameters that are stacked in one stored tensor, or the one that it is."""
        stacked, size = _STACKED_LAYERS.match(key), self._tensors[key].size
        layers: Sequence[int | None] = range(size[0]) if stacked else [None]
        experts: Sequence[int | None] = range(size[1 if stacked else 0]) if _EXPERTS in key else [None]
        for layer, expert in itertools.product(layers, experts):
            name = key if layer is None else _STACKED_LAYERS.sub(f"decoder.layers.{layer}.", key)
            if expert is not None:
                name = name.replace(_EXPERTS, f".experts.local_experts.{expert}.")
            if match := _NORM.fullmatch(name):
                name = match[1] + _STORED_AS[match[2]]
            yield name, _Place(key, tuple(i for i in (layer, expert) if i is not None))

    def _info(self, place: _Place) -> TensorInfo:
        entry = self._tensors[place.key]
        return TensorInfo(entry.properties.dtype, tuple(entry.size[len(place.index) :]))

    def _load(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        """One stored chunk, which is a file of torch.save inside a file."""
        info = self._stored[key, offset]
        with (self._directory / info.relative_path).open("rb") as stream:
            view = _create_file_view(stream, info.offset, info.length)
            loaded: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return loaded

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self._stored.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            path = self._directory / file
            if not path.is_file():
                raise UsageError(f"{path} is missing; copy the checkpoint again.")
            if path.stat().st_size < end:
                raise UsageError(f"{path} is cut off: {path.stat().st_size} bytes instead of {end}; copy it again.")


def _overlap(index: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...] | None:
    """What to take out of a chunk at `offsets` for the parameter at `index`; None where it has nothing of it."""
    leading = list(zip(index, offsets, sizes, strict=False))
    if not all(first <= i < first + size for i, first, size in leading):
        return None
    return tuple(i - first for i, first, _ in leading)
