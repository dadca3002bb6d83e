"""HF checkpoints that hold the experts of a layer as one tensor: which single tensors that one stands for.

transformers >= 5 keeps experts so in memory, and writes them so with save_original_format=False:
"...mlp.experts.gate_up_proj" [E, 2 F, H] and "...mlp.experts.down_proj" [E, H, F] in place of
"...mlp.experts.<e>.{gate,up}_proj.weight" [F, H] and "...mlp.experts.<e>.down_proj.weight" [H, F]. It knows names, no
files and no weights.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up|down)_proj")
_SINGLE = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<what>gate|up|down)_proj\.weight")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


class Place(NamedTuple):
    """Where a single expert's tensor is: fused[expert], cut into `parts` along its rows, the `part`-th of them."""

    fused: str
    expert: int
    part: int
    parts: int


def is_fused(name: str) -> bool:
    """Whether a tensor of that name holds all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def single_names(fused: str, num_experts: int) -> list[str]:
    """The names of the tensors that a fused one stands for, expert by expert."""
    match = _FUSED.fullmatch(fused)
    assert match is not None, fused
    parts = _PARTS[match["what"]]
    return [f"{match['experts']}.{expert}.{part}_proj.weight" for expert in range(num_experts) for part in parts]


def place_of(single: str) -> Place | None:
    """Where the tensor of that name is in a checkpoint with fused experts; None for what is no expert's."""
    match = _SINGLE.fullmatch(single)
    if match is None:
        return None
    what = next(what for what, parts in _PARTS.items() if match["what"] in parts)
    parts = _PARTS[what]
    return Place(f"{match['experts']}.{what}_proj", int(match["expert"]), parts.index(match["what"]), len(parts))
