"""Which tensors an HF checkpoint has, read from its headers: the yardstick of a complete weight sync.

It reads names only, no weights, and knows nothing about Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path

# Buffers that old checkpoints carry and no engine loads.
NOT_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def expected_hf_names(checkpoint: Path) -> set[str]:
    """Names of the trained tensors of an HF directory; empty when it has no safetensors (nothing to compare with).

    A tied `lm_head.weight` is left out: it is the embedding.
    """
    names = _names(checkpoint)
    config = checkpoint / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings", False):
        names.discard("lm_head.weight")
    return {name for name in names if not name.endswith(NOT_WEIGHTS)}


def _names(checkpoint: Path) -> set[str]:
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    return {name for file in checkpoint.glob("*.safetensors") for name in _header(file)} - {"__metadata__"}


def _header(file: Path) -> dict[str, object]:
    """The JSON at the front of a safetensors file: 8 bytes of its length, then itself."""
    with file.open("rb") as stream:
        header: dict[str, object] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return header
