"""One table per model family: which HF tensors a Megatron parameter is made of, and in which layout.

The tables are read in both directions (export and weight sync; loading), so that they cannot disagree. Everything
works on full tensors; how a full tensor is cut over tensor-parallel ranks is part of the layout (layouts.py), because
a gated MLP's two halves are cut one by one. Nothing here knows about process groups, files or dtypes.

Example: in a Qwen3 model with 2 query groups, "decoder.layers.3.self_attention.linear_qkv.weight" holds the rows [q
of group 0, k of group 0, v of group 0, q of group 1, ...] and becomes
"model.layers.3.self_attn.{q,k,v}_proj.weight".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from slime.backends.megatron_utils.megatron_to_hf.layouts import (
    DeltaNetConv,
    DeltaNetRows,
    DeltaNetRowsApart,
    GatedQkv,
    GateUp,
    GateUpTogether,
    Layout,
    Qkv,
    Same,
    SwappedHalves,
    Vocab,
)
from slime.models.hf_config import SUPPORTED_MODEL_TYPES
from slime.utils.errors import UsageError
from slime.utils.misc import load_function


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter of each layer (or of the model) and the HF tensors that it holds."""

    megatron: str
    """Name below the model; "{i}" stands for the layer, "{e}" for the expert, in the HF names "{k}" for the number of
    a layer that predicts further tokens among its like."""
    hf: tuple[str, ...]
    layout: Layout = Same()


def _layer(megatron: str, *hf: str, layout: Layout | None = None) -> Rule:
    return Rule(f"decoder.layers.{{i}}.{megatron}", tuple(f"model.layers.{{i}}.{n}" for n in hf), layout or Same())


_EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), Vocab()),  # absent in both when embeddings are tied
)
_LAYER_NORMS = (
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_ATTENTION = (
    _layer(
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{n}_proj.weight" for n in "qkv"),
        layout=Qkv(),
    ),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)


def _mlp(megatron: str, hf: str) -> tuple[Rule, Rule]:
    """A gated MLP at these places of a layer."""
    return (
        _layer(f"{megatron}.linear_fc1.weight", f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", layout=GateUp()),
        _layer(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight"),
    )


_DENSE = _EMBEDDINGS + _LAYER_NORMS + _ATTENTION + _mlp("mlp", "mlp")
_SANDWICH = (
    *(_EMBEDDINGS + _LAYER_NORMS + _ATTENTION),
    *(_layer(f"{norm}.weight", f"{norm}.weight") for norm in ("post_self_attn_layernorm", "post_mlp_layernorm")),
    _layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout=GateUpTogether()),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_QKV_BIAS = (_layer("self_attention.linear_qkv.bias", *(f"self_attn.{n}_proj.bias" for n in "qkv"), layout=Qkv()),)
_QK_NORM = tuple(_layer(f"self_attention.{n}_layernorm.weight", f"self_attn.{n}_norm.weight") for n in "qk")
_EXPERTS = (
    _layer("mlp.router.weight", "mlp.gate.weight"),
    *_mlp("mlp.experts.local_experts.{e}", "mlp.experts.{e}"),
)
_SHARED_EXPERTS = _mlp("mlp.shared_experts", "mlp.shared_experts")
_GATED_SHARED_EXPERT = (
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    _layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
_EXPERT_BIAS = (_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)
_SHARED_EXPERT_RULES = _EXPERTS + _SHARED_EXPERTS + _EXPERT_BIAS
_LATENT_ATTENTION = (
    _layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),  # without --q-lora-rank
    _layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    _layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
_LATENT_DENSE = _EMBEDDINGS + _LAYER_NORMS + _LATENT_ATTENTION + _mlp("mlp", "mlp")


def _delta_net(in_proj: tuple[str, ...], layout: Layout) -> tuple[Rule, ...]:
    """Layers with a gated delta net, and gated attention in the others (both are called self_attention)."""
    return (
        _layer("self_attention.in_proj.weight", *(f"linear_attn.{n}.weight" for n in in_proj), layout=layout),
        _layer("self_attention.conv1d.weight", "linear_attn.conv1d.weight", layout=DeltaNetConv()),
        _layer("self_attention.dt_bias", "linear_attn.dt_bias"),
        _layer("self_attention.A_log", "linear_attn.A_log"),
        _layer("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        _layer("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
        _layer("self_attention.linear_qkv.weight", *(f"self_attn.{n}_proj.weight" for n in "qkv"), layout=GatedQkv()),
        _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    )


_QWEN3_NEXT = (
    *(_EMBEDDINGS + _LAYER_NORMS + _QK_NORM + _mlp("mlp", "mlp")),
    *_delta_net(("in_proj_qkvz", "in_proj_ba"), DeltaNetRows()),
)


_QWEN3_5 = (
    *(_EMBEDDINGS + _LAYER_NORMS + _QK_NORM + _mlp("mlp", "mlp")),
    *_delta_net(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), DeltaNetRowsApart()),
)


_MINIMAX_M2 = (
    *(_EMBEDDINGS + _LAYER_NORMS + _ATTENTION + _QK_NORM),
    _layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
    _layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
    _layer(
        "mlp.experts.local_experts.{e}.linear_fc1.weight",
        *(f"block_sparse_moe.experts.{{e}}.{n}.weight" for n in ("w1", "w3")),
        layout=GateUp(),
    ),
    _layer("mlp.experts.local_experts.{e}.linear_fc2.weight", "block_sparse_moe.experts.{e}.w2.weight"),
)
_INDEXER = tuple(
    _layer(f"self_attention.core_attention.indexer.{name}", f"self_attn.indexer.{name}")
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)


_BESIDE_VISION = "model.language_model.layers"


def _beside_vision(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same language model in a checkpoint that also sees images."""
    return tuple(
        replace(rule, hf=tuple(re.sub(r"^model\.", "model.language_model.", n) for n in rule.hf)) for rule in rules
    )


@dataclass(frozen=True)
class _Predictions:
    """What HF calls the layers that predict further tokens: a layer of the model and what is around it."""

    layer: str = "model.layers.{i}"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"
    join_layout: Layout = Same()
    last_norm: str = "shared_head.norm"

    def after(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """The rules of a model, and those of its prediction layers."""
        layers = [
            replace(
                rule,
                megatron=rule.megatron.replace("decoder.layers.{i}.", "mtp.layers.{i}.transformer_layer."),
                hf=tuple(name.replace("model.layers.{i}", self.layer) for name in rule.hf),
            )
            for rule in rules
            if rule.megatron.startswith("decoder.layers.")
        ]
        around = (
            self._rule("enorm", self.embedding_norm),
            self._rule("hnorm", self.hidden_norm),
            self._rule("eh_proj", self.join, self.join_layout),
            self._rule("final_layernorm", self.last_norm),
        )
        return (*rules, *around, *layers)

    def _rule(self, megatron: str, hf: str, layout: Layout | None = None) -> Rule:
        return Rule(f"mtp.layers.{{i}}.{megatron}.weight", (f"{self.layer}.{hf}.weight",), layout or Same())


# MiMo's join takes [hidden state, embedding], the others' [embedding, hidden state].
_MIMO_PREDICTIONS = _Predictions(
    layer="model.mtp_layers.{k}",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    join="input_proj",
    join_layout=SwappedHalves(),
    last_norm="final_layernorm",
)
_LATENT_WITH_EXPERTS = _Predictions().after(_LATENT_DENSE + _SHARED_EXPERT_RULES)


@dataclass(frozen=True)
class Family:
    """The rule table of one HF model_type."""

    model_type: str
    rules: tuple[Rule, ...]
    layers: str = "model.layers"
    """Where the HF model has its layers: a module of transformers in one (slime_plugins.models.hf_attention) has the
    same names on both sides, and needs no rule."""

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(rule.megatron), rule) for rule in self.rules]

    @cached_property
    def _found(self) -> dict[tuple[str, int], tuple[Rule, tuple[str, ...]]]:
        return {}  # a weight sync asks for the same names again and again

    def find(self, name: str, num_layers: int) -> tuple[Rule, tuple[str, ...]]:
        """Return (rule, HF names) of a Megatron parameter.

        Args:
            name: global name, with or without the "module." of wrappers before it.
            num_layers: of the model, behind which layers that predict further tokens are numbered.

        Raises:
            KeyError: when no rule of this family has that name.
        """
        key = (name, num_layers)
        if key not in self._found:
            self._found[key] = self._search(strip_wrappers(name), num_layers)
        return self._found[key]

    def _search(self, bare: str, num_layers: int) -> tuple[Rule, tuple[str, ...]]:
        for pattern, rule in self._patterns:
            if match := pattern.fullmatch(bare):
                places = match.groupdict()
                if bare.startswith("mtp."):
                    places["k"] = str(int(places["i"]) - num_layers)
                return rule, tuple(_fill(hf, places) for hf in rule.hf)
        if match := _HF_MODULE.fullmatch(bare):
            name = f"{self.layers}.{match[1]}.{match[2]}"
            return Rule(bare, (name,)), (name,)
        raise KeyError(f"no rule of the family {self.model_type} names the Megatron parameter {bare}.")


_HF_MODULE = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.hf\.(.+)")


def _pattern(megatron: str) -> re.Pattern[str]:
    """A rule's name with a group for each place that it leaves open."""
    return re.compile(re.sub(r"\\\{([ie])\\\}", r"(?P<\1>\\d+)", re.escape(megatron)))


def _fill(template: str, places: dict[str, str]) -> str:
    for place, number in places.items():
        template = template.replace("{" + place + "}", number)
    return template


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", _DENSE),
        Family("qwen2", _DENSE + _QKV_BIAS),
        Family("mimo", _MIMO_PREDICTIONS.after(_DENSE + _QKV_BIAS)),
        Family("qwen2_moe", _DENSE + _QKV_BIAS + _EXPERTS + _GATED_SHARED_EXPERT),
        Family("qwen3", _DENSE + _QK_NORM),
        Family("glm4", _SANDWICH + _QKV_BIAS),
        Family("qwen3_moe", _DENSE + _QK_NORM + _EXPERTS),
        Family("qwen3_next", _QWEN3_NEXT + _EXPERTS + _GATED_SHARED_EXPERT),
        Family("qwen3_5", _beside_vision(_QWEN3_5), _BESIDE_VISION),
        Family("qwen3_5_text", _QWEN3_5),
        Family("qwen3_5_moe", _beside_vision(_QWEN3_5 + _EXPERTS + _GATED_SHARED_EXPERT), _BESIDE_VISION),
        Family("qwen3_5_moe_text", _QWEN3_5 + _EXPERTS + _GATED_SHARED_EXPERT),
        Family("minimax_m2", _MINIMAX_M2),
        Family("glm4_moe", _Predictions().after(_DENSE + _QKV_BIAS + _QK_NORM + _SHARED_EXPERT_RULES)),
        Family("glm4_moe_lite", _LATENT_WITH_EXPERTS),
        Family("glm_moe_dsa", _LATENT_DENSE + _SHARED_EXPERT_RULES + _INDEXER),
        Family("deepseek_v32", _LATENT_DENSE + _SHARED_EXPERT_RULES + _INDEXER),
        Family("deepseek_v3", _LATENT_WITH_EXPERTS),
        Family("kimi_k2", _LATENT_DENSE + _SHARED_EXPERT_RULES),
    )
}


def numbered_in_model(name: str, num_layers: int) -> str:
    """The name with prediction layers, which Megatron counts from 0, numbered behind the model's layers."""
    return re.sub(r"(?<=mtp\.layers\.)\d+", lambda m: str(int(m[0]) + num_layers), name)


def strip_wrappers(name: str) -> str:
    """Drop the "module." prefixes that Megatron's wrappers put before a parameter's name."""
    return re.sub(r"^(module\.)+", "", name)


_NAMES = {
    "qwen2.5": "qwen2",
    "qwen3.5": "qwen35",
    "deepseekv3.2exp": "deepseekv32",
    "deepseekv3.2": "deepseekv32",
    "glm5.2": "glmmoedsa",
    "glm5": "glmmoedsa",
}
"""What models are called -> how their model_type begins, without underscores."""


def family_of(model_name: str) -> Family:
    """Return the family of a model_type ("qwen3") or of a longer name of it ("qwen3config", "Qwen3-0.6B").

    With a colon it is the path of a `Family` of the user's own: "pkg.module:NAME" or "path/to/file.py:NAME".

    Raises:
        UsageError: when no table fits, naming those that exist.
    """
    if ":" in model_name:
        return _own_family(model_name)
    plain = re.sub(r"[^a-z0-9.]", "", model_name.lower())
    for written, meant in _NAMES.items():
        plain = plain.replace(written, meant)
    # 30B-A3B: 3 B of 30 B are active
    plain = re.sub(r"(qwen35|qwen[23])(?=.*a\d+b)(?!.*(moe|next|vl))", r"\1moe", plain)
    found = [family for name, family in FAMILIES.items() if name.replace("_", "") in plain]
    longest = max(found, key=lambda family: len(family.model_type), default=None)
    rest = plain.replace(longest.model_type.replace("_", ""), "", 1) if longest else ""
    is_variant = re.search(r"moe|next|vl|lite|audio|qwen|llama|^4(?!b)|^v|^\.?2$|^\.\d|^\.?5(?!\d*b)", rest)
    if longest is None or is_variant:
        raise UsageError(
            f"no weight rules for {model_name!r}; there are rules for {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    return longest


def _own_family(path: str) -> Family:
    try:
        found = load_function(path)
    except ImportError as error:
        raise UsageError(str(error)) from error
    if not isinstance(found, Family):
        raise UsageError(f"{path} is a {type(found).__name__}, not a megatron_to_hf.rules.Family.")
    return found
