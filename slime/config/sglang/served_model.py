"""What SGLang (0.5.17) would serve wrongly, without saying so: refused when flags are parsed.

It reads config.json and names of tensors, no weights.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slime.utils.fused_experts import is_fused

OWN_HEAD = ("qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite")
"""Families whose models in SGLang have an output layer of their own, whatever tie_word_embeddings says."""

_DEEPSEEK: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
NEEDED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "minimax_m2": {"rotary_dim": 64, "use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
}
"""What SGLang reads of a family's config and transformers does not know -> the value of the published models."""


def served_model_problems(hf_config: Mapping[str, Any], checkpoint: str, *, is_synced: bool) -> list[str]:
    """Sentences about a model that engines would compute with weights that nothing loads.

    Args:
        hf_config: the content of config.json.
        checkpoint: its directory.
        is_synced: whether the engines get a trainer's weights before they generate.
    """
    model_type, problems = hf_config.get("model_type"), []
    if model_type in OWN_HEAD and hf_config.get("tie_word_embeddings"):
        problems.append(
            f"--hf-checkpoint {checkpoint}: SGLang ignores tie_word_embeddings of {model_type} and would sample with "
            "a random output layer; save the embedding as lm_head.weight, too, and set tie_word_embeddings to false."
        )
    problems += [
        f"--hf-checkpoint {checkpoint}: config.json has no {name}, which SGLang needs for {model_type} and "
        f"transformers does not write; add it as the published model has it ({value!r})."
        for name, value in NEEDED.get(str(model_type), {}).items()
        if hf_config.get(name) is None
    ]
    if not is_synced and any(map(is_fused, _names(Path(checkpoint)))):
        problems.append(
            f"--hf-checkpoint {checkpoint} stores the experts of a layer as one tensor, which SGLang does not load "
            "(a trainer's weight sync would bring them); save it with save_original_format=True of transformers."
        )
    return problems


def _names(checkpoint: Path) -> Collection[str]:
    """Names of tensors, from the index or the header; none where there is neither, or no readable one."""
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    try:
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        with single.open("rb") as stream:
            size = min(int.from_bytes(stream.read(8), "little"), single.stat().st_size)
            return dict(json.loads(stream.read(size)))
    except (OSError, ValueError, KeyError, TypeError):
        return []  # whoever loads it says what is wrong with it
