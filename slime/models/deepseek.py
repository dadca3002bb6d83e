"""DeepSeek-V3, its sparse attention (V3.2) and Kimi-K2; GLM's larger models have the same parts."""

from __future__ import annotations

from operator import attrgetter, itemgetter

from slime.models.family import (
    BASE,
    EXPERT_RULES,
    MLP,
    SIGMOID_ROUTER,
    Config,
    Part,
    Predictions,
    family_of_parts,
    layer_rule,
    mlp_rules,
)

LATENT_ATTENTION = Part(
    (
        layer_rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),  # without --q-lora-rank
        layer_rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
        layer_rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
        layer_rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
        layer_rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        layer_rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        layer_rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ),
    needs=("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    flags={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": itemgetter("num_attention_heads"),
        "kv_channels": itemgetter("v_head_dim"),
        "q_lora_rank": itemgetter("q_lora_rank"),
        "kv_lora_rank": itemgetter("kv_lora_rank"),
        "qk_head_dim": itemgetter("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": itemgetter("qk_rope_head_dim"),
        "v_head_dim": itemgetter("v_head_dim"),
    },
    tiny={
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20},
        "num_key_value_heads": attrgetter("heads"),
    },
)
"""Attention over a compressed key and value (arXiv:2405.04434)."""


def indexer_types(hf: Config, num_layers: int) -> list[str]:
    """Return "full" for each layer that has an indexer, "shared" for each that takes an earlier one's choice."""
    if hf.get("indexer_types"):
        return list(hf["indexer_types"])[:num_layers]
    if pattern := hf.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern][:num_layers]
    every, offset = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]


def _first_indexer(hf: Config) -> dict[str, bool]:
    kinds = set(indexer_types(hf, hf["num_hidden_layers"])[:1])
    return {f"a first layer whose indexer is {', '.join(kinds)}": kinds != {"full"}}


INDEXER = Part(
    tuple(
        layer_rule(f"self_attention.core_attention.indexer.{name}", f"self_attn.indexer.{name}")
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    ),
    needs=("index_topk", "index_head_dim", "index_n_heads", "q_lora_rank"),
    flags={
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": itemgetter("index_n_heads"),
        "dsa_indexer_head_dim": itemgetter("index_head_dim"),
        "dsa_indexer_topk": itemgetter("index_topk"),
    },
    specs=("get_glm5_spec",),
    refuses=_first_indexer,
    tiny={"index_topk": 16, "index_head_dim": 32, "index_n_heads": 4},
    has_int4=False,
    needs_fp8_blocks=True,
    needs_gpu="SGLang's sparse attention asks for a CUDA device",
)
"""Attention to the keys that an indexer chooses (DeepSeek-V3.2)."""


def _num_dense_layers(hf: Config) -> int:
    """How many layers before those with experts; transformers >= 5 lists the kind of every layer of some families."""
    kinds = list(hf.get("mlp_layer_types") or ["dense"])
    number: int | None = hf.get("first_k_dense_replace")
    return kinds.count("dense") if number is None else number


def _expert_layers(hf: Config) -> int | list[int]:
    dense, layers = _num_dense_layers(hf), hf["num_hidden_layers"]
    return [0] * dense + [1] * (layers - dense) if dense else 1


def _begins_with_dense_layers(hf: Config) -> bool:
    dense = _num_dense_layers(hf)
    expected = ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense)
    return list(hf.get("mlp_layer_types") or expected) == expected


def _other_experts(hf: Config) -> dict[str, bool]:
    groups, per_tok = hf["topk_group"], hf["num_experts_per_tok"]
    return {
        "norm_topk_prob false": not hf["norm_topk_prob"],
        # Megatron ranks a group by the sum of its best num_experts_per_tok / topk_group experts, HF of its best 2.
        f"num_experts_per_tok {per_tok} with topk_group {groups}": hf["n_group"] > 1 and per_tok // groups != 2,
        "rope_interleave false": not hf.get("rope_interleave", True),
        # What transformers does not read, and the models' own code does.
        f"scoring_func {hf.get('scoring_func')!r}": hf.get("scoring_func", "sigmoid") != "sigmoid",
        f"topk_method {hf.get('topk_method')!r}": hf.get("topk_method", "noaux_tc") != "noaux_tc",
        f"moe_layer_freq {hf.get('moe_layer_freq')!r}": hf.get("moe_layer_freq", 1) != 1,
        "mlp_layer_types with a dense layer behind one with experts": not _begins_with_dense_layers(hf),
    }


def _factor(hf: Config) -> float | None:
    scale = float(hf["routed_scaling_factor"])
    return scale if scale != 1 else None


SHARED_EXPERTS = Part(
    (
        *EXPERT_RULES,
        *mlp_rules("mlp.shared_experts", "mlp.shared_experts"),
        layer_rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    ),
    needs=(
        *("num_experts_per_tok", "moe_intermediate_size", "num_experts"),
        *("n_shared_experts", "n_group", "topk_group"),
    ),
    reads=lambda hf: {"num_experts": hf.get("num_local_experts", hf["n_routed_experts"])},
    flags={
        **SIGMOID_ROUTER,
        "num_moe_experts": itemgetter("num_experts"),
        "moe_ffn_hidden_size": itemgetter("moe_intermediate_size"),
        "moe_layer_freq": _expert_layers,
        "moe_router_num_groups": lambda hf: hf["n_group"] if hf["n_group"] > 1 else None,
        "moe_router_group_topk": lambda hf: hf["topk_group"] if hf["n_group"] > 1 else None,
        "moe_router_topk_scaling_factor": _factor,
        "moe_shared_expert_intermediate_size": lambda hf: hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_aux_loss_coeff": 0.0,
    },
    refuses=_other_experts,
    tiny={
        **{"n_routed_experts": attrgetter("experts"), "n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": attrgetter("expert_ffn_size"), "num_experts_per_tok": 2},
    },
)
"""Experts of DeepSeek-V3's kind (arXiv:2412.19437): sigmoid scores, a bias for the choice, shared experts."""
LATENT_WITH_EXPERTS = (BASE, LATENT_ATTENTION, MLP, SHARED_EXPERTS)
_DEFAULTS = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_SGLANG_NEEDS = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
# What SGLang reads, and the published configs have; transformers does not know it.
_TINY = {**_SGLANG_NEEDS, "scoring_func": "sigmoid"}
DEEPSEEK = (
    family_of_parts(
        "deepseek_v32",
        *LATENT_WITH_EXPERTS,
        INDEXER,
        defaults={**_DEFAULTS, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
        hf_class="DeepseekV32",
        # transformers builds num_experts, whatever n_routed_experts says
        tiny={**_TINY, "num_experts": attrgetter("experts"), "n_group": 4, "topk_group": 1},
        sglang_needs=_SGLANG_NEEDS,
    ),
    family_of_parts(
        "deepseek_v3",
        *LATENT_WITH_EXPERTS,
        predictions=Predictions(),
        defaults={**_DEFAULTS, "rope_interleave": True},
        hf_class="DeepseekV3",
        tiny={**_TINY, "n_group": 4, "topk_group": 1},
        sglang_needs=_SGLANG_NEEDS,
    ),
    family_of_parts(
        "kimi_k2",
        *LATENT_WITH_EXPERTS,
        defaults={**_DEFAULTS, "rope_interleave": True},
        hf_class="DeepseekV3",
        hf_type="deepseek_v3",
        tiny={**_TINY, "n_group": 1, "topk_group": 1},
        sglang_needs=_SGLANG_NEEDS,
    ),
)
