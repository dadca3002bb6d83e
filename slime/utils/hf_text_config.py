"""The language model's part of a config.json, and the tensors of a checkpoint that are not the language model's.

Checkpoints that also see images (Qwen3.5) keep the language model's numbers in `text_config`. Plain dicts and names;
nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_OTHER_PARTS = ("model.visual.", "mtp.")
"""Names of what stays as it is while the language model is trained: the part that sees images, and layers that predict
further tokens of families for which there are no rules."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the language model under the names of a plain config.json; the model_type stays."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    return {**config, **inner, "model_type": config.get("model_type")}


def is_of_other_part(name: str) -> bool:
    """Whether a tensor of that name is none of the language model's."""
    return name.startswith(OF_OTHER_PARTS)
