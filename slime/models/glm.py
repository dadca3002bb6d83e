"""GLM-4 and its models with experts: GLM-4.5, GLM-4.7-Flash (latent attention) and GLM-5 (sparse attention)."""

from __future__ import annotations

from slime.models.deepseek import INDEXER, LATENT_WITH_EXPERTS, SHARED_EXPERTS
from slime.models.family import ATTENTION, BASE, MLP, QK_NORM, Part, Predictions, family_of_parts, layer_rule, qkv_bias
from slime.models.layouts import GateUpTogether

_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")
SANDWICH = Part(
    (
        *(layer_rule(f"{norm}.weight", f"{norm}.weight") for norm in _NORMS),
        layer_rule("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout=GateUpTogether()),
        layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ),
    # It rotates channels 2i and 2i + 1 together; other families rotate i and i + half.
    flags={**dict.fromkeys(_NORMS, True), "rotary_interleaved": True},
)
"""Norms before and after both parts of a layer."""
_QK_NORM_IF_SAID = Part(QK_NORM.rules)
GLM = (
    family_of_parts(
        "glm4",
        *(BASE, ATTENTION, SANDWICH, qkv_bias("attention_bias")),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        takes=("attention_bias", "partial_rotary_factor"),
        hf_class="Glm4",
    ),
    family_of_parts(
        "glm4_moe",
        *(BASE, ATTENTION, MLP, qkv_bias("attention_bias"), _QK_NORM_IF_SAID, SHARED_EXPERTS),
        predictions=Predictions(),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        takes=("attention_bias", "partial_rotary_factor"),
        hf_class="Glm4Moe",
        tiny={"use_qk_norm": True},
        sglang_has_own_head=True,
    ),
    family_of_parts(
        "glm4_moe_lite",
        *LATENT_WITH_EXPERTS,
        predictions=Predictions(),
        defaults={
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rope_interleave": True,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
        hf_class="Glm4MoeLite",
        sglang_needs={"first_k_dense_replace": 1},
        sglang_has_own_head=True,
    ),
    family_of_parts(
        "glm_moe_dsa",
        *LATENT_WITH_EXPERTS,
        INDEXER,
        defaults={
            "num_key_value_heads": 64,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
        },
        hf_class="GlmMoeDsa",
    ),
)
