"""Which tensors an HF checkpoint has, read from its headers: the yardstick of a complete weight sync.

It reads names only, no weights, and knows nothing about Megatron.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path

from slime.utils.fused_experts import is_fused, single_names
from slime.utils.hf_text_config import is_of_other_part, text_config
from slime.utils.safetensors_files import read_header, read_index

# Buffers that old checkpoints carry and no engine loads.
NOT_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def expected_hf_names(checkpoint: Path, num_predictions: int = 0) -> set[str]:
    """Names of the trained tensors of an HF directory; empty when it has no safetensors (nothing to compare with).

    A tied `lm_head.weight` is left out: it is the embedding. So are layers that predict further tokens, behind the
    first `num_predictions`, and their copies of the embedding and the output layer, which engines do not load; and
    what is not of the language model, which no trainer changes. Experts stored as one tensor are sent one by one.
    """
    names = _names(checkpoint)
    path = checkpoint / "config.json"
    config = text_config(json.loads(path.read_text())) if path.is_file() else {}
    if config.get("tie_word_embeddings", False):
        names.discard("lm_head.weight")
    last = config["num_hidden_layers"] + num_predictions if config.get("num_nextn_predict_layers") else math.inf
    return {
        name
        for name in names
        if not name.endswith(NOT_WEIGHTS)
        and not prediction_copy_of(name)
        and not is_of_other_part(name)
        and _is_of_first_layers(name, last, num_predictions)
    }


def left_over(checkpoint: Path, known: Collection[str], used: Collection[str], num_predictions: int = 0) -> str | None:
    """A sentence about the trained tensors of an HF directory that no weight of a model is made of, if there are any.

    Args:
        checkpoint: the directory.
        known: tensors as a reader names them, which takes scales together with what they scale.
        used: what the model's weights are made of.
        num_predictions: as in `expected_hf_names`.
    """
    left = sorted((expected_hf_names(checkpoint, num_predictions) & set(known)) - set(used))
    if not left:
        return None
    first = ", ".join(left[:5])
    return f"{checkpoint}: {len(left)} tensor(s) have no place in the model that the flags describe: {first}."


def prediction_copy_of(name: str) -> str | None:
    """The tensor of the model that a tensor of a prediction layer is a copy of, if it is one."""
    if not (match := re.fullmatch(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", name)):
        return None
    return "model.embed_tokens.weight" if match[1] == "embed_tokens" else "lm_head.weight"


def _is_of_first_layers(name: str, num_layers: float, num_predictions: int) -> bool:
    """Whether it is of no layer, or of the first so many; MiMo counts prediction layers by themselves."""
    match = re.match(r"model\.(mtp_)?layers\.(\d+)\.", name)
    return match is None or int(match[2]) < (num_predictions if match[1] else num_layers)


def _names(checkpoint: Path) -> set[str]:
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        file_of: dict[str, str] = read_index(checkpoint)["weight_map"]
    else:
        file_of = {name: file.name for file in checkpoint.glob("*.safetensors") for name in read_header(file).tensors}
    fused = [name for name in file_of if is_fused(name)]
    headers = {file: read_header(checkpoint / file).tensors for file in {file_of[name] for name in fused}}
    singles = {one for name in fused for one in single_names(name, headers[file_of[name]][name]["shape"][0])}
    return file_of.keys() - set(fused) | singles
