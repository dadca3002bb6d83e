"""What a Hugging Face config.json leaves out, by model_type, and which families are of one kind.

Values only; what they mean in Megatron's terms is slime.models.hf_config's.
"""

from __future__ import annotations

from typing import Any

_QWEN2 = {"num_key_value_heads": 32}
_DEEPSEEK_V3 = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
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
_DELTA_NET = {
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5 = {"num_key_value_heads": 4, "head_dim": 256, **_DELTA_NET}
_QWEN3_5_MOE = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    **_DELTA_NET,
}
# What transformers takes where a config.json does not say, by model_type. It has no class of mimo, which is Qwen2 with
# layers that predict further tokens, and of kimi_k2, which is DeepSeek-V3 under another name.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None},
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "glm4": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        **_DELTA_NET,
    },
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "minimax_m2": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    "glm4_moe": {
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
    "glm4_moe_lite": {
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
    "glm_moe_dsa": {
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
    "deepseek_v32": {
        **{name: value for name, value in _DEEPSEEK_V3.items() if name != "rope_interleave"},
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}
SPARSE = ("glm_moe_dsa", "deepseek_v32")
"""Families with latent attention to the keys that an indexer chooses."""
WITH_SHARED_EXPERTS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", *SPARSE)
"""Families with experts of DeepSeek-V3's kind."""
QWEN3_5_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
"""Families all of whose layers have experts, and whose config has no width of others."""
QWEN_MOE = ("qwen2_moe", "qwen3_moe", "qwen3_next", *QWEN3_5_MOE)
"""Families with experts of Qwen's kind."""
LATENT = ("glm4_moe_lite", "deepseek_v3", "kimi_k2", *SPARSE)
"""Families with latent attention."""
DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_text", *QWEN3_5_MOE)
"""Families with layers of linear attention, and gates behind the others."""
WITHOUT_FP8 = DELTA_NET
"""Families of which nobody has compared the weights that engines keep in fp8 with those that a sync would quantise."""
WITHOUT_INT4 = (*DELTA_NET, *SPARSE)
"""The same for int4."""
