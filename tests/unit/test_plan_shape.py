"""Parameter counts of a shape: against totals of published models, and against models built on the meta device."""

from __future__ import annotations

import argparse

import pytest
import torch
import transformers as hf

from slime.plan.fit import kv_elements
from slime.utils.model_shape import ModelShape


def shape_of(**values) -> ModelShape:
    defaults = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "group_query_attention": True}
    shape = ModelShape.of(argparse.Namespace(**(defaults | values)))
    assert shape is not None
    return shape


QWEN3_06B = {
    "num_layers": 28,
    "hidden_size": 1024,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 128,
    "padded_vocab_size": 151936,
    "qk_layernorm": True,
}
QWEN3_4B = QWEN3_06B | {
    "num_layers": 36,
    "hidden_size": 2560,
    "ffn_hidden_size": 9728,
    "num_attention_heads": 32,
}
QWEN3_30B_A3B = QWEN3_06B | {
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "untie_embeddings_and_output_weights": True,
    "num_moe_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
}
GLM4_9B = {
    "num_layers": 40,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_attention_heads": 32,
    "num_query_groups": 2,
    "kv_channels": 128,
    "padded_vocab_size": 151552,
    "add_qkv_bias": True,
    "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
    "untie_embeddings_and_output_weights": True,
}
# Totals that the models' safetensors files hold.
PUBLISHED = {
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920),
    "Qwen3-4B": (QWEN3_4B, 4_022_468_096),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "GLM-4-9B-0414": (GLM4_9B, 9_400_279_040),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_that_its_files_hold(name):
    values, total = PUBLISHED[name]
    shape = shape_of(**values)
    assert shape.num_params == total
    assert sum(number for part, number in shape.components.items() if part != "total") == total


def test_a_token_goes_through_the_chosen_experts_alone():
    shape = shape_of(**QWEN3_30B_A3B)
    idle = 48 * (128 - 8) * 3 * 2048 * 768  # layers x experts that are not chosen x their three matrices
    # The input embedding is looked up, not multiplied; the last norm is no matrix.
    assert shape.num_active_params == shape.num_params - idle - 151936 * 2048 - 2048


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OURS = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "padded_vocab_size": 96,
}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MLA_OURS = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
}
MOE_V3 = {
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
MOE_V3_OURS = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1],
    "untie_embeddings_and_output_weights": True,
}
UNTIED = {"tie_word_embeddings": False}
META = {
    "llama, tied": (hf.LlamaConfig, TINY | {"tie_word_embeddings": True}, OURS),
    "qwen2, biases": (
        hf.Qwen2Config,
        TINY | UNTIED,
        OURS | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": True},
    ),
    "qwen2 with shared experts": (
        hf.Qwen2MoeConfig,
        TINY | UNTIED | {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        OURS
        | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "num_moe_experts": 8}
        | {"moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    ),
    "deepseek v3": (hf.DeepseekV3Config, TINY | UNTIED | MLA | MOE_V3, OURS | MLA_OURS | MOE_V3_OURS),
}


NEXT = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
NEXT_OURS = {
    **{"num_layers": 4, "kv_channels": 16, "qk_layernorm": True, "attention_output_gate": True},
    **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
    **{"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40},
    **{"moe_shared_expert_gate": True, "untie_embeddings_and_output_weights": True},
}
DSA = {"num_experts": 8, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 16}
DSA_OURS = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 16,
}
META |= {
    "qwen3 next": (hf.Qwen3NextConfig, TINY | UNTIED | NEXT, OURS | NEXT_OURS),
    "deepseek v3.2": (
        hf.DeepseekV32Config,
        TINY | UNTIED | MLA | MOE_V3 | DSA,
        OURS | MLA_OURS | MOE_V3_OURS | DSA_OURS,
    ),
}


@pytest.mark.parametrize("name", META)
def test_a_shape_counts_what_the_model_of_the_same_sizes_has(name):
    config_class, config, ours = META[name]
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config_class(**config))
    assert shape_of(**ours).num_params == sum(parameter.numel() for parameter in model.parameters())


def test_layers_that_do_not_attend_cache_nothing():
    shape = shape_of(**OURS | NEXT_OURS)
    assert shape.num_attention_layers == 1
    assert kv_elements(shape, tp=1, pp=1) == 2 * 2 * 16
    latent = shape_of(**OURS | MLA_OURS | MOE_V3_OURS | DSA_OURS)
    assert kv_elements(latent, tp=1, pp=1) == 3 * (16 + 4 + 8), "latent, rotated key, and the indexer's key"


def test_prediction_layers_add_a_decoder_layer_a_projection_and_three_norms():
    plain, more = shape_of(**OURS), shape_of(**OURS, mtp_num_layers=1)
    layer = plain.layer_params(2).total
    assert more.num_params - plain.num_params == layer + 2 * 32 * 32 + 3 * 32


def test_flags_without_a_model_have_no_shape():
    assert ModelShape.of(argparse.Namespace(num_layers=None, hidden_size=8)) is None
