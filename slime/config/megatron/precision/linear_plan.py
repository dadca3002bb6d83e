"""The linear layers of a model: a rank's share of each weight, and which ones a checkpoint holds in few bits.

Names are those of Megatron's modules in a decoder layer ("self_attention.linear_proj"). It reads sizes and rules, and
no weights; fp8_forward_plan.py, fp8_training_plan.py and int4_plan.py choose layers by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.models.family import Family
from slime.utils.errors import UsageError
from slime.utils.model_shape import ModelShape
from slime.weights.formats import WeightFormat, weight_format_of

BLOCK = 128
"""Rows and columns of a weight, and channels of a token, that share a scale in fp8."""
PART_OF_BLOCK = 64
"""SGLang's rule: the rows of a weight are a multiple of it, else it takes another kernel."""
EXPERTS = "mlp.experts"
OF_EXPERT = tuple(f"{EXPERTS}.local_experts.0.{name}" for name in ("linear_fc1", "linear_fc2"))


def known_format(hf_config: Mapping[str, Any] | None) -> WeightFormat | None:
    """The format of a checkpoint's weights; None of one in 16 bit, and of one that is refused elsewhere."""
    try:
        return None if hf_config is None else weight_format_of(hf_config)
    except UsageError:
        return None


def checkpoint_quantizes(fmt: WeightFormat, family: Family, num_layers: int, layer: int, module: str) -> bool:
    """Whether a checkpoint has all HF tensors of a linear layer in few bits; not where no rule names it.

    Args:
        fmt: of the checkpoint.
        family: the names of its tensors.
        num_layers: of the model.
        layer: the decoder layer, from 0.
        module: its linear layer.
    """
    try:
        _, names = family.find(f"decoder.layers.{layer}.{module}.weight", num_layers)
    except KeyError:
        return False
    return all(fmt.quantizes(name) for name in names)


@dataclass(frozen=True)
class LinearSize:
    """A rank's share of a linear layer's weight.

    Attributes:
        rows: those that lie together in an HF tensor: of one head, of a gate, or all.
        columns: inputs.
        may_end_in_part: the share ends where the HF tensor does, whose last block may be smaller.
    """

    rows: int
    columns: int
    may_end_in_part: bool = False

    @property
    def fits(self) -> bool:
        """Whether its blocks are the HF tensors', and SGLang multiplies such ones with DeepGEMM."""
        step = PART_OF_BLOCK if self.may_end_in_part else BLOCK
        return self.rows % step == 0 and self.columns % BLOCK == 0


def linear_sizes(shape: ModelShape, layer: int, tensor: int) -> dict[str, LinearSize]:
    """Name -> size of a layer's linear layers outside of experts, on one of `tensor` tensor-parallel ranks."""
    hidden, found = shape.hidden_size, {}
    if not shape.is_linear(layer):
        found = {f"self_attention.{name}": size for name, size in _attention_sizes(shape, tensor).items()}
    mlp, width = "mlp", shape.ffn_hidden_size
    if shape.moe_layers[layer]:
        mlp, width = "mlp.shared_experts", shape.experts.shared_ffn_hidden_size if shape.experts else 0
    if width:
        found |= {f"{mlp}.{name}": size for name, size in mlp_sizes(hidden, width // tensor).items()}
    return found


def _attention_sizes(shape: ModelShape, tensor: int) -> dict[str, LinearSize]:
    hidden, latent = shape.hidden_size, shape.latent
    proj = {"linear_proj": LinearSize(hidden, shape.attention_out_width // tensor, True)}
    if latent is None:
        return {"linear_qkv": LinearSize(shape.kv_channels, hidden)} | proj
    is_whole, heads = tensor == 1, shape.num_attention_heads // tensor
    queries = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    keys = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    if latent.q_lora_rank is None:
        found = {"linear_q_proj": LinearSize(queries, hidden, is_whole)}
    else:
        found = {
            "linear_q_down_proj": LinearSize(latent.q_lora_rank // tensor, hidden, is_whole),
            "linear_q_up_proj": LinearSize(queries, latent.q_lora_rank, is_whole),
        }
    values = heads * (latent.qk_head_dim + latent.v_head_dim)
    found["linear_kv_down_proj"] = LinearSize(keys // tensor, hidden, is_whole)
    found["linear_kv_up_proj"] = LinearSize(values, latent.kv_lora_rank, is_whole)
    return found | proj


def mlp_sizes(hidden: int, width: int) -> dict[str, LinearSize]:
    return {"linear_fc1": LinearSize(width, hidden), "linear_fc2": LinearSize(hidden, width, True)}
