"""How large a model is: its sizes as Megatron's flags give them, and the number of parameters of every part.

`ModelShape.of` is the one place where the plan reads Megatron's model flags. Everything else counts with a shape. It
knows nothing about bytes, devices or parallel layout, and builds no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slime.utils.misc import needed

if TYPE_CHECKING:
    from slime.config.args import Args


# Megatron's attribute -> what Megatron takes where no flag says otherwise, for every flag that a shape depends on
MODEL_DEFAULTS: dict[str, Any] = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": None,
    "group_query_attention": False,
    "kv_channels": None,
    "rotary_percent": 1.0,
    "vocab_size": None,
    "padded_vocab_size": None,
    "untie_embeddings_and_output_weights": False,
    "swiglu": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "post_self_attn_layernorm": False,
    "post_mlp_layernorm": False,
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_layer_freq": 1,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "mtp_num_layers": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "dsa_indexer_n_heads": None,
    "dsa_indexer_head_dim": None,
    "dsa_indexer_topk": None,
}

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def model_values(args: Args) -> dict[str, Any]:
    """The model flags among `args`; one that no parser has registered, or that is unset, has Megatron's default."""
    given = {name: value for name, value in vars(args).items() if name in MODEL_DEFAULTS and value is not None}
    return MODEL_DEFAULTS | given


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V3): low-rank queries (None: full) and keys/values."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net (arXiv:2412.06464), which takes the place of attention in some layers."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int  # Of the convolution of each channel of queries, keys and values with itself
    is_linear: tuple[bool, ...]  # Per layer, whether it is one

    @property
    def conv_width(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Channels of all value heads, which are those of the output, too."""
        return self.num_value_heads * self.value_head_dim

    @property
    def in_width(self) -> int:
        """Rows of the projection into it: queries, keys, values and their gates, strengths and decays."""
        return self.conv_width + self.value_width + 2 * self.num_value_heads


@dataclass(frozen=True)
class Indexer:
    """Sizes of what chooses the keys of sparse attention (DeepSeek-V3.2, arXiv:2512.02556)."""

    num_heads: int
    head_dim: int
    topk: int  # Keys that a token attends to


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture-of-experts layer."""

    num: int
    ffn_hidden_size: int
    topk: int
    shared_ffn_hidden_size: int  # 0 = no shared expert
    has_shared_gate: bool


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer by how a layout divides them: over TP, over no rank, over experts' ranks."""

    attention: int  # Matrices (and their biases) that TP divides
    mlp: int  # The same of the dense MLP or the shared expert
    replicated: int  # Norms, router, latent down-projections: on every TP rank in full
    experts: int  # Divided over expert parallelism and the experts' tensor parallelism

    @property
    def total(self) -> int:
        """Of all ranks."""
        return self.attention + self.mlp + self.replicated + self.experts


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder as it is trained."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_channels: int  # Of a head, those that are rotated
    vocab_size: int  # Rows of the embedding, padding included
    is_tied: bool
    is_gated: bool  # Gated linear unit: two matrices into the MLP, one out of it
    has_bias: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    num_norms: int  # Norms of a layer over the hidden size: two, or four with norms after attention and MLP
    norm_width: int  # Weights per channel of a norm: 1 for RMSNorm, 2 (with bias) for LayerNorm
    moe_layers: tuple[bool, ...]  # Per layer, whether it has experts
    num_mtp_layers: int
    experts: Experts | None = None
    latent: LatentAttention | None = None
    # Attention's output is multiplied by the sigmoid of a projection as wide as the queries
    has_output_gate: bool = False
    delta_net: DeltaNet | None = None
    # Counted in every layer: which ones take the choice of an earlier one (GLM-5.2), no flag says
    indexer: Indexer | None = None
    adapted: tuple[str, ...] = ()  # Linear layers with LoRA adapters; none stands for all
    tower_params: int = 0  # Of the part that sees images, which no flag describes

    @classmethod
    def of(cls, args: Args) -> ModelShape | None:
        """The shape that the flags describe; None where they leave out what a model cannot do without."""
        values = model_values(args)
        if any(not values[name] for name in REQUIRED) or not (values["padded_vocab_size"] or values["vocab_size"]):
            return None
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        ffn, head = values["ffn_hidden_size"] or 4 * hidden, values["kv_channels"] or hidden // heads
        return cls(
            num_layers=values["num_layers"],
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=(values["num_query_groups"] if values["group_query_attention"] else None) or heads,
            kv_channels=head,
            rotary_channels=int(head * values["rotary_percent"]),
            vocab_size=values["padded_vocab_size"] or values["vocab_size"],
            is_tied=not values["untie_embeddings_and_output_weights"],
            is_gated=values["swiglu"],
            has_bias=values["add_bias_linear"],
            has_qkv_bias=values["add_qkv_bias"] or values["add_bias_linear"],
            has_qk_norm=values["qk_layernorm"],
            num_norms=2 + values["post_self_attn_layernorm"] + values["post_mlp_layernorm"],
            norm_width=1 if values["normalization"] == "RMSNorm" else 2,
            moe_layers=moe_pattern(values),
            num_mtp_layers=values["mtp_num_layers"] or 0,
            experts=_experts(values, ffn) if values["num_moe_experts"] else None,
            latent=_latent(values) if values["multi_latent_attention"] else None,
            has_output_gate=values["attention_output_gate"],
            delta_net=_delta_net(values) if values["experimental_attention_variant"] == "gated_delta_net" else None,
            indexer=_indexer(values) if values["experimental_attention_variant"] == "dsa" else None,
        )

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        head = self.latent.qk_head_dim + self.latent.qk_pos_emb_head_dim if self.latent else self.kv_channels
        return self.num_attention_heads * head

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.query_width if self.latent else self.num_query_groups * self.kv_channels

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        if self.latent:
            return self.num_attention_heads * self.latent.v_head_dim
        return self.num_query_groups * self.kv_channels

    @property
    def attention_out_width(self) -> int:
        """Channels of what attention returns, over all query heads."""
        return self.num_attention_heads * (self.latent.v_head_dim if self.latent else self.kv_channels)

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has a gated delta net in the place of attention."""
        return self.delta_net is not None and self.delta_net.is_linear[layer]

    @property
    def num_attention_layers(self) -> int:
        """Layers that attend, and whose keys and values engines cache."""
        return sum(not self.is_linear(layer) for layer in range(self.num_layers))

    @property
    def embedding_params(self) -> int:
        """Of the input embedding, and again of an output layer that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def norm_params(self) -> int:
        """Of one norm over the hidden size."""
        return self.norm_width * self.hidden_size

    def layer_params(self, layer: int) -> LayerParams:
        """Parameters of a decoder layer."""
        if self.is_linear(layer):
            matrices, replicated = self._delta_net_params()
        else:
            matrices, replicated = self._latent_params() if self.latent else self._attention_params()
        replicated += self.num_norms * self.norm_params
        if self.experts is None or not self.moe_layers[layer]:
            return LayerParams(matrices, self._mlp_params(self.ffn_hidden_size), replicated, 0)
        moe = self.experts
        router = (moe.num + moe.has_shared_gate) * self.hidden_size
        shared = self._mlp_params(moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else 0
        return LayerParams(matrices, shared, replicated + router, moe.num * self._mlp_params(moe.ffn_hidden_size))

    def adapter_params(self, layer: int, rank: int) -> LayerParams:
        """Parameters of LoRA adapters of this rank on the linear layers of a decoder layer that have some.

        Each has rank x (inputs + outputs). TP cuts the half on the side where it cuts the weight: B of the layers
        into attention and MLP, A of those out of them. The other half is `replicated`; experts' adapters are whole
        on the rank that has the expert.
        """
        found = dict.fromkeys(("self_attention", "mlp", "experts"), (0, 0))
        for name, widths in self._adapter_widths(layer).items():
            if not self.adapted or name in self.adapted:
                part = "experts" if "{e}" in name else name.partition(".")[0]
                found[part] = found[part][0] + widths[0], found[part][1] + widths[1]
        attention, mlp = found["self_attention"], found["mlp"]
        return LayerParams(
            rank * attention[0], rank * mlp[0], rank * (attention[1] + mlp[1]), rank * sum(found["experts"])
        )

    def output_adapter_params(self, rank: int) -> tuple[int, int]:
        """Parameters of a LoRA adapter of this rank on the output layer: B, which TP cuts, and A, which is whole."""
        return (rank * self.vocab_size, rank * self.hidden_size) if "output_layer" in self.adapted else (0, 0)

    def _adapter_widths(self, layer: int) -> dict[str, tuple[int, int]]:
        """Linear layer -> channels on the sides that TP cuts, and on those that it does not, over its projections."""
        hidden, up = self.hidden_size, 1 + self.is_gated
        found = {"self_attention.linear_proj": (self.attention_out_width, hidden)}
        if self.latent:
            latent = self.latent
            down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
            heads = self.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
            found["self_attention.linear_kv_down_proj"] = (down, hidden)
            found["self_attention.linear_kv_up_proj"] = (heads, latent.kv_lora_rank)
            if latent.q_lora_rank is None:
                found["self_attention.linear_q_proj"] = (self.query_width, hidden)
            else:
                found["self_attention.linear_q_down_proj"] = (latent.q_lora_rank, hidden)
                found["self_attention.linear_q_up_proj"] = (self.query_width, latent.q_lora_rank)
        else:
            found["self_attention.linear_qkv"] = (self.query_width + self.key_width + self.value_width, 3 * hidden)
        mlps = [("mlp", 1, self.ffn_hidden_size)]
        if self.experts is not None and self.moe_layers[layer]:
            shared = self.experts.shared_ffn_hidden_size
            mlps = [("mlp.experts.local_experts.{e}", self.experts.num, self.experts.ffn_hidden_size)]
            mlps += [("mlp.shared_experts", 1, shared)] if shared else []
        for mlp, number, ffn in mlps:
            found[f"{mlp}.linear_fc1"] = (number * up * ffn, number * up * hidden)
            found[f"{mlp}.linear_fc2"] = (number * ffn, number * hidden)
        return found

    def mtp_params(self) -> LayerParams:
        """Parameters of one multi-token prediction layer: a decoder layer like the last, a projection, three norms."""
        layer = self.layer_params(self.num_layers - 1)
        projection, norms = 2 * self.hidden_size**2, 3 * self.norm_params
        return LayerParams(layer.attention + projection, layer.mlp, layer.replicated + norms, layer.experts)

    @cached_property
    def components(self) -> dict[str, int]:
        """Parameters of each part of the model, and of all."""
        layers = [self.layer_params(layer) for layer in range(self.num_layers)]
        layers += [self.mtp_params()] * self.num_mtp_layers
        parts = {
            "embedding": self.embedding_params,
            "attention": sum(layer.attention for layer in layers),
            "mlp": sum(layer.mlp for layer in layers),
            "experts": sum(layer.experts for layer in layers),
            "norms and routers": sum(layer.replicated for layer in layers) + self.norm_params,
            "output layer": 0 if self.is_tied else self.embedding_params,
            "tower": self.tower_params,
        }
        return parts | {"total": sum(parts.values())}

    @property
    def num_params(self) -> int:
        """Of the whole model, padding of the vocabulary included."""
        return self.components["total"]

    @property
    def num_active_params(self) -> int:
        """Of the matrices that one token goes through: layers with `topk` experts, and the output layer."""
        share = self.experts.topk / self.experts.num if self.experts else 0.0
        layers = [self.layer_params(layer) for layer in range(self.num_layers)]
        dense = sum(layer.attention + layer.mlp + layer.replicated for layer in layers)
        return int(dense + share * sum(layer.experts for layer in layers) + self.embedding_params)

    def _attention_params(self) -> tuple[int, int]:
        qkv = (1 + self.has_output_gate) * self.query_width + self.key_width + self.value_width
        matrices = self.hidden_size * (qkv + self.attention_out_width) + qkv * self.has_qkv_bias
        replicated = self.hidden_size * self.has_bias + 2 * self.kv_channels * self.norm_width * self.has_qk_norm
        return matrices, replicated

    def _latent_params(self) -> tuple[int, int]:
        latent = needed(self.latent)
        up = latent.kv_lora_rank * self.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
        down = self.hidden_size * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        norms = latent.kv_lora_rank * self.norm_width * self.has_qk_norm
        if latent.q_lora_rank is None:
            query = self.hidden_size * self.query_width
        else:
            query = latent.q_lora_rank * self.query_width
            down += self.hidden_size * latent.q_lora_rank
            norms += latent.q_lora_rank * self.norm_width * self.has_qk_norm
        chooser = self._indexer_params() if self.indexer else 0
        return query + up + self.attention_out_width * self.hidden_size, down + norms + chooser

    def _delta_net_params(self) -> tuple[int, int]:
        net = needed(self.delta_net)
        matrices = self.hidden_size * (net.in_width + net.value_width)
        by_channel = net.conv_width * net.kernel + 2 * net.num_value_heads  # convolution; decays and their biases
        return matrices + by_channel, net.value_head_dim

    def _indexer_params(self) -> int:
        assert self.indexer is not None and self.latent is not None
        heads, head = self.indexer.num_heads, self.indexer.head_dim
        return (self.latent.q_lora_rank or 0) * heads * head + self.hidden_size * (head + heads) + 2 * head

    def _mlp_params(self, width: int) -> int:
        matrices = (3 if self.is_gated else 2) * self.hidden_size * width
        return matrices + ((1 + self.is_gated) * width + self.hidden_size) * self.has_bias


def moe_pattern(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Per layer, whether it has experts: every Nth from layer 0 on, or as a list says."""
    num_layers, freq = values["num_layers"], values["moe_layer_freq"]
    if not values["num_moe_experts"]:
        return (False,) * num_layers
    if isinstance(freq, int):
        return tuple(layer % freq == 0 for layer in range(num_layers))
    pattern = tuple(bool(entry) for entry in freq)
    return (pattern + (True,) * num_layers)[:num_layers]  # a list that is too short is refused elsewhere


def linear_attention_pattern(linear_attention_freq: int | Sequence[int] | None, num_layers: int) -> list[int]:
    """Return 1 for each layer with linear attention and 0 for the others; a number N means that every Nth is full."""
    if linear_attention_freq is None:
        return [0] * num_layers
    if isinstance(linear_attention_freq, int):
        return [int((layer + 1) % linear_attention_freq != 0) for layer in range(num_layers)]
    return list(linear_attention_freq)


def _delta_net(values: Mapping[str, Any]) -> DeltaNet:
    pattern = linear_attention_pattern(values["linear_attention_freq"], values["num_layers"])
    return DeltaNet(
        num_key_heads=values["linear_num_key_heads"],
        num_value_heads=values["linear_num_value_heads"],
        key_head_dim=values["linear_key_head_dim"],
        value_head_dim=values["linear_value_head_dim"],
        kernel=values["linear_conv_kernel_dim"],
        # A list that is too short is refused elsewhere.
        is_linear=tuple(map(bool, (pattern + [0] * values["num_layers"])[: values["num_layers"]])),
    )


def _indexer(values: Mapping[str, Any]) -> Indexer | None:
    sizes = [values[f"dsa_indexer_{name}"] for name in ("n_heads", "head_dim", "topk")]
    return Indexer(*sizes) if all(sizes) and values["multi_latent_attention"] else None


def _experts(values: Mapping[str, Any], ffn: int) -> Experts:
    return Experts(
        num=values["num_moe_experts"],
        ffn_hidden_size=values["moe_ffn_hidden_size"] or ffn,
        topk=values["moe_router_topk"],
        shared_ffn_hidden_size=values["moe_shared_expert_intermediate_size"] or 0,
        has_shared_gate=values["moe_shared_expert_gate"],
    )


def _latent(values: Mapping[str, Any]) -> LatentAttention:
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return LatentAttention(**{name: values[name] for name in names})
