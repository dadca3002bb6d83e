"""A model family as one row: the weights of its parts, the fields of its config.json, and what both mean in Megatron.

`Family` is the row, `Part` what several families are made of (attention, experts, ...), `Rule` a Megatron parameter
with the HF tensors that it holds. Rules are read in both directions (export and weight sync; loading), so that they
cannot disagree. They work on full tensors; how a full tensor is cut over tensor-parallel ranks belongs to the layout
(layouts.py), because a gated MLP's two halves are cut one by one. All rows: slime.models.families.FAMILIES. Parts
that families of several makers share are here, and Llama, made of them; those of one maker are with its families.

Example: in a Qwen3 model with 2 query groups, "decoder.layers.3.self_attention.linear_qkv.weight" holds the rows [q
of group 0, k of group 0, v of group 0, q of group 1, ...] and becomes
"model.layers.3.self_attn.{q,k,v}_proj.weight".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from slime.models.layouts import GateUp, Layout, Qkv, Same, Vocab
from slime.weights.names import text_config

Config = Mapping[str, Any]
"""The numbers of a config.json."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter of each layer (or of the model) and the HF tensors that it holds.

    Attributes:
        megatron: name below the model; "{i}" stands for the layer, "{e}" for the expert.
        hf: names of the tensors, with the same places, and "{k}" for the number of a layer that predicts further
            tokens among its like.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Same()


def layer_rule(megatron: str, *hf: str, layout: Layout | None = None) -> Rule:
    """Return the rule of a parameter of each layer, from names below the layer."""
    return Rule(f"decoder.layers.{{i}}.{megatron}", tuple(f"model.layers.{{i}}.{n}" for n in hf), layout or Same())


@dataclass(frozen=True, eq=False)
class Part:
    """What several families are made of. A value of a table may be a function of what the table is for.

    Attributes:
        rules: its weights.
        needs: fields of the config that must be whole numbers above 0.
        reads: fields that follow from others, from the config with its defaults; they replace what it says.
        flags: Megatron's attribute -> value, or function of the config.
        specs: functions that --spec may name and whose layers take their sizes from these flags.
        refuses: feature of a config that no flag expresses -> whether this one has it.
        tiny: field of a tiny model's config -> value, or function of the sizes asked for (tools/make_tiny_model.py).
        has_fp8, has_int4: whether the weights that engines keep so were compared with those that a sync quantises.
        needs_fp8_blocks: SGLang reads its weights in fp8 with a scale for each block alone.
        needs_gpu: why SGLang's CPU engine does not serve it.
    """

    rules: tuple[Rule, ...] = ()
    needs: tuple[str, ...] = ()
    reads: Callable[[Config], Config] = lambda hf: {}
    flags: Config = field(default_factory=dict)
    specs: tuple[str, ...] = ()
    refuses: Callable[[Config], dict[str, bool]] = lambda hf: {}
    tiny: Config = field(default_factory=dict)
    has_fp8: bool = True
    has_int4: bool = True
    needs_fp8_blocks: bool = False
    needs_gpu: str = ""


def resolved(table: Config, source: Any) -> dict[str, Any]:
    """Return the table with each function in it called with `source`."""
    return {name: value(source) if callable(value) else value for name, value in table.items()}


@dataclass(frozen=True)
class Predictions:
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


@dataclass(frozen=True, eq=False)
class Family:
    """One HF model_type. A user's own has names and rules alone (docs/architectures_beyond_megatron.md).

    Attributes:
        layers: where the HF model has its layers: a module of transformers in one (slime_plugins.models.hf_attention)
            has the same names on both sides, and needs no rule.
        defaults: what transformers takes where a config.json does not say.
        rope_theta: the same of the base of rotary embeddings, which a config has in one of several places.
        takes: fields of the config that other families refuse: attention_bias, partial_rotary_factor.
        hf_class: how the names of transformers' classes begin; None where tools/make_tiny_model.py makes none.
        hf_type: the model_type of transformers that it is under another name.
        tiny: as of a `Part`.
        tiny_vision: the same of the part that sees images.
        sglang_needs: fields that SGLang reads and transformers does not know -> the value of the published models.
        sglang_has_own_head: SGLang gives it an output layer of its own, whatever tie_word_embeddings says.
        norms_all_heads: its norms of queries and keys go over all heads, those of other ranks included.
        gguf_type: what GGUF calls it, "" for model_type; None where tools/convert_gguf_to_hf.py cannot read it.
        own_class: how the names of classes begin that its checkpoints bring along, because transformers has none.
        tiny_adds: fields of a tiny model's config that transformers drops and SGLang reads.
    """

    model_type: str
    rules: tuple[Rule, ...]
    layers: str = "model.layers"
    parts: tuple[Part, ...] = ()
    defaults: Config = field(default_factory=dict)
    rope_theta: float = 10000.0
    takes: tuple[str, ...] = ()
    hf_class: str | None = None
    hf_type: str | None = None
    sees_images: bool = False
    tiny: Config = field(default_factory=dict)
    tiny_vision: Config = field(default_factory=dict)
    sglang_needs: Config = field(default_factory=dict)
    sglang_has_own_head: bool = False
    norms_all_heads: bool = False
    gguf_type: str | None = ""
    own_class: str | None = None
    tiny_adds: Config = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether there are rules for experts."""
        return any("{e}" in rule.megatron for rule in self.rules)

    @property
    def predicts(self) -> bool:
        """Whether there are rules for layers that predict further tokens."""
        return any(rule.megatron.startswith("mtp.") for rule in self.rules)

    @property
    def is_latent(self) -> bool:
        """Whether it attends over a compressed key and value."""
        return self.sets("multi_latent_attention")

    @property
    def has_fp8(self) -> bool:
        """Whether checkpoints in fp8 can be trained."""
        return all(part.has_fp8 for part in self.parts)

    @property
    def has_int4(self) -> bool:
        """Whether checkpoints in int4 can be trained."""
        return all(part.has_int4 for part in self.parts)

    @property
    def needs_fp8_blocks(self) -> bool:
        """Whether fp8 weights need a scale for each block."""
        return any(part.needs_fp8_blocks for part in self.parts)

    @property
    def needs_gpu(self) -> str:
        """Why SGLang's CPU engine does not serve it; empty where it does."""
        return next((part.needs_gpu for part in self.parts if part.needs_gpu), "")

    def sets(self, flag: str) -> bool:
        """Whether one of its parts gives this attribute of Megatron a value."""
        return any(flag in part.flags for part in self.parts)

    def read(self, hf_config: Config) -> dict[str, Any]:
        """Return the numbers of the language model, with what the config leaves out."""
        hf = {**self.defaults, **text_config(hf_config)}
        for part in self.parts:
            hf |= part.reads(hf)
        return hf

    def tiny_config(self, sizes: Any) -> dict[str, Any]:
        """Return what a tiny model's config has of its own."""
        tables = [*(part.tiny for part in self.parts), self.tiny]
        return {name: value for table in tables for name, value in resolved(table, sizes).items()}

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
        if self.sees_images and bare.startswith("visual."):
            name = bare if self.layers == "model.layers" else f"model.{bare}"
            return Rule(bare, (name,)), (name,)
        if match := _HF_MODULE.fullmatch(bare):
            name = f"{self.layers}.{match[1]}.{match[2]}"
            return Rule(bare, (name,)), (name,)
        raise KeyError(f"no rule of the family {self.model_type} names the Megatron parameter {bare}.")


def family_of_parts(
    model_type: str,
    *parts: Part,
    predictions: Predictions | None = None,
    sees_images: bool = False,
    has_plain_names: bool = False,
    **facts: Any,
) -> Family:
    """Return the row of a family that is made of these parts.

    Args:
        predictions: its layers that predict further tokens.
        sees_images: the checkpoint has the language model next to a part that sees images.
        has_plain_names: and calls its tensors as if it were alone.
        facts: further fields of `Family`.
    """
    rules = tuple(rule for part in parts for rule in part.rules)
    if predictions is not None:
        rules = predictions.after(rules)
    if sees_images and not has_plain_names:
        facts["layers"] = "model.language_model.layers"
        rules = tuple(
            replace(rule, hf=tuple(re.sub(r"^model\.", "model.language_model.", name) for name in rule.hf))
            for rule in rules
        )
    return Family(model_type, rules, parts=parts, sees_images=sees_images, **facts)


_HF_MODULE = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.hf\.(.+)")


def _pattern(megatron: str) -> re.Pattern[str]:
    """A rule's name with a group for each place that it leaves open."""
    return re.compile(re.sub(r"\\\{([ie])\\\}", r"(?P<\1>\\d+)", re.escape(megatron)))


def _fill(template: str, places: dict[str, str]) -> str:
    for place, number in places.items():
        template = template.replace("{" + place + "}", number)
    return template


def numbered_in_model(name: str, num_layers: int) -> str:
    """The name with prediction layers, which Megatron counts from 0, numbered behind the model's layers."""
    return re.sub(r"(?<=mtp\.layers\.)\d+", lambda m: str(int(m[0]) + num_layers), name)


def strip_wrappers(name: str) -> str:
    """Drop the "module." prefixes that Megatron's wrappers put before a parameter's name."""
    return re.sub(r"^(module\.)+", "", name)


BASE = Part(
    (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Rule("output_layer.weight", ("lm_head.weight",), Vocab()),  # absent in both when embeddings are tied
        layer_rule("input_layernorm.weight", "input_layernorm.weight"),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    )
)
ATTENTION = Part(
    (
        layer_rule("self_attention.linear_qkv.weight", *(f"self_attn.{n}_proj.weight" for n in "qkv"), layout=Qkv()),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    )
)
QK_NORM = Part(
    tuple(layer_rule(f"self_attention.{n}_layernorm.weight", f"self_attn.{n}_norm.weight") for n in "qk"),
    flags={"qk_layernorm": True},
)


def mlp_rules(megatron: str, hf: str) -> tuple[Rule, Rule]:
    """Return the rules of a gated MLP at these places of a layer."""
    return (
        layer_rule(f"{megatron}.linear_fc1.weight", f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", layout=GateUp()),
        layer_rule(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight"),
    )


MLP = Part(mlp_rules("mlp", "mlp"))
EXPERT_RULES = (
    layer_rule("mlp.router.weight", "mlp.gate.weight"),
    *mlp_rules("mlp.experts.local_experts.{e}", "mlp.experts.{e}"),
)


def qkv_bias(name: str | None = None) -> Part:
    """Return the biases of queries, keys and values; the field `name` says whether they are there, without it all."""
    rule = layer_rule("self_attention.linear_qkv.bias", *(f"self_attn.{n}_proj.bias" for n in "qkv"), layout=Qkv())
    return Part((rule,), flags={"add_qkv_bias": True if name is None else lambda hf: bool(hf[name])})


SIGMOID_ROUTER = {
    "moe_router_topk": lambda hf: hf["num_experts_per_tok"],
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,  # pre-training balances the load with it; here it is the model's
    "moe_shared_expert_gate": False,
}
"""Flags of experts that are chosen by sigmoid scores and a bias."""


def aux_loss_coeff(hf: Config) -> Any:
    """Return the weight of the load-balancing loss, which transformers adds when it returns the router's logits."""
    return hf.get("router_aux_loss_coef", 0.001) if hf.get("output_router_logits") else 0.0


LLAMA = family_of_parts("llama", BASE, ATTENTION, MLP, defaults={"num_key_value_heads": None}, hf_class="Llama")
