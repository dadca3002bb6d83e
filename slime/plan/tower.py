"""The part of a model that sees images: its sizes, its parameters, and what its passes keep.

A tower keeps per patch, in elements of the compute dtype, as slime.plan.activations counts a decoder:

    layer              norms: input and output = 4 H (Qwen2.5-VL on CPU 6 H), projection 3 H, rotated q and k 2 H,
                       attention's output, per image and joined, 2 H; MLP 2 F, with a gate 4 F (3 F in one kernel)
    once               its numbers, the last layer's output H, cos and sin 2 d; of each merger 3 H: input, and both
                       sides of its activation (Qwen2.5-VL on CPU: 4 H of its norm)

H hidden, F MLP width, d channels of a head. Also the fp32 statistics of norms and softmax. Full recomputation keeps
the input of every layer and makes one layer again at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.plan.activations import FP32, Compute


@dataclass(frozen=True)
class Tower:
    """Sizes of the part of a model that sees images."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch_width: int  # Numbers of a patch
    patches_per_token: int
    out_size: int  # Channels of a token, which are the language model's
    num_deepstack: int  # Inner layers that the language model reads, too
    num_positions: int  # Rows of an embedding of positions
    is_gated: bool  # The gated MLP and the norms without bias of Qwen2.5-VL

    @classmethod
    def of(cls, vision: Mapping[str, Any]) -> Tower:
        """The tower that the `vision_config` of a config.json of a Qwen model describes."""
        channels = vision.get("in_channels") or vision.get("in_chans") or 3
        return cls(
            num_layers=vision["depth"],
            hidden_size=vision["hidden_size"],
            ffn_hidden_size=vision["intermediate_size"],
            num_heads=vision["num_heads"],
            patch_width=channels * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2,
            patches_per_token=vision.get("spatial_merge_size", 2) ** 2,
            out_size=vision["out_hidden_size"],
            num_deepstack=len(vision.get("deepstack_visual_indexes") or ()),
            num_positions=vision.get("num_position_embeddings") or 0,
            is_gated=vision.get("hidden_act") == "silu",
        )

    @property
    def layer_params(self) -> int:
        """Of one layer."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        norms = (2 if self.is_gated else 4) * hidden
        mlp = (2 + self.is_gated) * hidden * ffn + (1 + self.is_gated) * ffn + hidden
        return norms + 4 * hidden * (hidden + 1) + mlp

    @property
    def num_params(self) -> int:
        """Of all layers, of the embeddings of patches and positions, and of what makes tokens of patches."""
        hidden, joined = self.hidden_size, self.patches_per_token * self.hidden_size
        merger = joined * (joined + 1) + self.out_size * (joined + 1)
        norms = hidden if self.is_gated else 2 * hidden + 2 * joined * self.num_deepstack
        patches = hidden * (self.patch_width + (not self.is_gated) + self.num_positions)
        return self.num_layers * self.layer_params + patches + norms + (1 + self.num_deepstack) * merger


def tower_layer_saved(tower: Tower, compute: Compute) -> int:
    """Bytes per patch that a layer of the tower keeps for its backward pass."""
    hidden, is_composite = tower.hidden_size, tower.is_gated and compute.is_cpu
    mlp = (3 if compute.has_fused_gate else 4) if tower.is_gated else 2
    elements = (11 + 2 * is_composite) * hidden + mlp * tower.ffn_hidden_size
    return elements * compute.element_size + (tower.num_heads + (2 if tower.is_gated else 4)) * FP32


def tower_saved(tower: Tower, compute: Compute, *, recomputes: bool) -> tuple[int, int]:
    """Bytes per patch of the whole tower: (kept until its backward pass, made again for one layer)."""
    layer, hidden = tower_layer_saved(tower, compute), tower.hidden_size
    mergers = (1 + tower.num_deepstack) * 3 * hidden + hidden
    mergers += hidden if tower.is_gated and compute.is_cpu else 0
    once = (tower.patch_width + mergers) * compute.element_size + 2 * hidden // tower.num_heads * FP32
    if recomputes:
        return once + tower.num_layers * hidden * compute.element_size, layer
    return once + tower.num_layers * layer, 0
