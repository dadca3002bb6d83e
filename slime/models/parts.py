"""Parts that families of several makers share: embeddings, attention, MLPs, biases and norms; and Llama, made of them.

Parts of one maker's models are with its families: qwen.py, glm.py, deepseek.py, minimax.py.
"""

from __future__ import annotations

from typing import Any

from slime.models.family import Config, Part, Rule, family_of_parts, layer_rule
from slime.models.layouts import GateUp, Qkv, Vocab

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
