"""Which tensors an HF checkpoint has, read from its headers: the yardstick of a complete weight sync.

It reads names only, no weights, and knows nothing about Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.utils.fused_experts import is_fused, single_names

# Buffers that old checkpoints carry and no engine loads.
NOT_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def expected_hf_names(checkpoint: Path) -> set[str]:
    """Names of the trained tensors of an HF directory; empty when it has no safetensors (nothing to compare with).

    A tied `lm_head.weight` is left out: it is the embedding. Experts stored as one tensor are sent one by one.
    """
    names = _names(checkpoint)
    config = checkpoint / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings", False):
        names.discard("lm_head.weight")
    return {name for name in names if not name.endswith(NOT_WEIGHTS)}


def _names(checkpoint: Path) -> set[str]:
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        file_of = {name: file.name for file in checkpoint.glob("*.safetensors") for name in _header(file)}
    fused = [name for name in file_of if is_fused(name)]
    headers = {file: _header(checkpoint / file) for file in {file_of[name] for name in fused}}
    singles = {one for name in fused for one in single_names(name, headers[file_of[name]][name]["shape"][0])}
    return (file_of.keys() - set(fused) | singles) - {"__metadata__"}


def _header(file: Path) -> dict[str, Any]:
    """The JSON at the front of a safetensors file: 8 bytes of its length, then itself."""
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return header
