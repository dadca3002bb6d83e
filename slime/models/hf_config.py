"""What a Hugging Face config.json means in Megatron's terms.

It works on the plain dict of config.json; it imports neither Megatron nor transformers, opens no weights and knows
nothing about the flags that were given (slime.models.hf_config_check compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.models.hf_defaults import (
    DEFAULTS,
    DELTA_NET,
    LATENT,
    QWEN3_5_MOE,
    QWEN_MOE,
    SPARSE,
    WITH_SHARED_EXPERTS,
    WITHOUT_FP8,
    WITHOUT_INT4,
)
from slime.models.hf_rope import missing_rope_features, rope_args, rope_numbers, rope_of
from slime.utils.errors import UsageError
from slime.utils.hf_text_config import text_config
from slime.utils.model_shape import linear_attention_pattern
from slime.weights.formats import quantization_config_of, weight_format_of

SUPPORTED_MODEL_TYPES = tuple(DEFAULTS)
"""`model_type`s that can be trained: their Megatron flags follow from the config, and their weights have rules."""

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_MOE_SIZES = ("num_experts_per_tok", "moe_intermediate_size")
_SHARED_SIZES = ("n_shared_experts", "n_group", "topk_group")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_WITH_QK_NORM = ("qwen3", "qwen3_moe", "minimax_m2", *LATENT, *DELTA_NET)
_SPARSE_SIZES = ("index_topk", "index_head_dim", "index_n_heads", "q_lora_rank")
_DELTA_NET_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_WITH_SHARED_GATE = ("qwen2_moe", "qwen3_next", *QWEN3_5_MOE)
_DELTA_NET_VALUES = ("experimental_attention_variant", "linear_attention_freq", *_DELTA_NET_SIZES)
SPEC_VALUES = {
    "get_qwen3_5_spec": _DELTA_NET_VALUES,
    "get_qwen3_next_spec": _DELTA_NET_VALUES,
    "get_glm5_spec": (
        "experimental_attention_variant",
        "dsa_indexer_n_heads",
        "dsa_indexer_head_dim",
        "dsa_indexer_topk",
    ),
}
"""Function of a specification of ours -> attributes that its layers are made of."""
LATENT_ROPE = (
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_OTHER_NUMBERS = ("num_key_value_heads", "head_dim", "rotary_dim", "max_position_embeddings", "rms_norm_eps")


def moe_layer_pattern(moe_layer_freq: int | list[int], num_layers: int) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense one; a number N means layers 0, N, 2N, ..."""
    if isinstance(moe_layer_freq, int):
        return [int(layer % moe_layer_freq == 0) for layer in range(num_layers)]
    return list(moe_layer_freq)


def model_args_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Megatron model flags that build this HF model: {attribute: value}.

    Raises:
        UsageError: for a model_type that cannot be trained, a feature of the config that Megatron's model does not
            have, or a config in which numbers are missing.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise UsageError(
            f"model_type {model_type!r} of the HF config: its Megatron flags cannot be derived, only those of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}; give them yourself (as scripts/models/*.sh) instead of "
            "--model-args-from-hf."
        )
    hf = DEFAULTS[model_type] | text_config(hf_config)
    if model_type in QWEN3_5_MOE:
        hf = {"intermediate_size": hf["moe_intermediate_size"], "decoder_sparse_step": 1, "norm_topk_prob": True} | hf
    if problems := _number_problems(hf) or _underivable_features(hf):
        raise UsageError(problems)
    heads = hf["num_attention_heads"]
    values = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": hf["num_key_value_heads"] or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "vocab_size": hf["vocab_size"],
        "max_position_embeddings": hf.get("max_position_embeddings", 4096),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": _has_qkv_bias(hf),
        "layernorm_zero_centered_gamma": model_type in DELTA_NET,
        "attention_output_gate": model_type in DELTA_NET,
        "qk_layernorm": model_type in _WITH_QK_NORM or bool(hf.get("use_qk_norm")),
        "post_self_attn_layernorm": model_type == "glm4",
        "post_mlp_layernorm": model_type == "glm4",
        "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", False),
        "position_embedding_type": "rope",
    }
    if model_type == "minimax_m2":
        values["spec"] = ["slime_plugins.models.minimax_m2", "get_minimax_m2_spec"]
    return values | rope_args(hf) | _latent_args(hf) | _variant_args(hf) | _moe_args(hf)


def args_implied_by_hf(
    hf_config: Mapping[str, Any], spec: list[str] | None, *, has_latent_attention: bool
) -> dict[str, Any]:
    """Return what layers of other kinds than Megatron's are, where a command line leaves it to the HF config.

    A specification of such layers (--spec) is given without their sizes, and latent attention without its rotary
    embeddings.

    Args:
        hf_config: of a model whose flags can be derived; of any other nothing follows.
        spec: module and function.
        has_latent_attention: --multi-latent-attention is given.
    """
    names = SPEC_VALUES.get(spec[-1], ()) if spec else ()
    names += LATENT_ROPE if has_latent_attention else ()
    if not names or hf_config.get("model_type") not in DEFAULTS:
        return {}
    try:
        values = model_args_from_hf(hf_config)
    except UsageError:
        return {}  # said where the flags are compared with the config
    return {name: values[name] for name in names if values.get(name) is not None}


def _has_qkv_bias(hf: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have a bias."""
    name = {"qwen2_moe": "qkv_bias", "glm4": "attention_bias", "glm4_moe": "attention_bias"}.get(hf["model_type"])
    return bool(hf[name]) if name else hf["model_type"] in ("qwen2", "mimo")


def _number_problems(hf: Mapping[str, Any]) -> list[str]:
    """One sentence for each number that is missing or cannot be one."""
    values = {name: hf.get(name) for name in _SIZES}
    model_type = hf["model_type"]
    if model_type in (*QWEN_MOE, *WITH_SHARED_EXPERTS):
        values |= {name: hf[name] for name in _MOE_SIZES} | {"num_experts": _num_experts(hf)}
    if model_type in QWEN_MOE:
        values["decoder_sparse_step"] = hf["decoder_sparse_step"]
    if model_type in _WITH_SHARED_GATE:
        values["shared_expert_intermediate_size"] = hf["shared_expert_intermediate_size"]
    values |= {name: hf[name] for name in _SHARED_SIZES if model_type in WITH_SHARED_EXPERTS}
    if model_type == "minimax_m2":
        values |= {name: hf[name] for name in ("num_local_experts", "num_experts_per_tok")}
    values |= {name: hf[name] for name in _SPARSE_SIZES if model_type in SPARSE}
    values |= {name: hf[name] for name in _DELTA_NET_SIZES if model_type in DELTA_NET}
    if model_type in DELTA_NET:
        values["full_attention_interval"] = hf.get("full_attention_interval", 4)
    values |= {name: hf[name] for name in _LATENT_SIZES if model_type in LATENT}
    problems = [
        f"the HF config has no {name}; is it the whole config.json of the model?"
        for name, value in values.items()
        if value is None
    ]
    problems += [
        f"the HF config says {name} = {value!r}, which is no whole number above 0."
        for name, value in values.items()
        if value is not None and not (isinstance(value, int) and value > 0)
    ]
    if not all(isinstance(hf.get(name) or {}, Mapping) for name in ("rope_scaling", "rope_parameters")):
        return [*problems, "the HF config has rope_parameters or rope_scaling that are no mapping."]
    problems += [
        f"the HF config says {name} = {value!r}, which is no number above 0."
        for name in _OTHER_NUMBERS
        if (value := hf.get(name)) is not None and not (isinstance(value, int | float) and value > 0)
    ]
    return problems + rope_numbers(hf)


def _num_experts(hf: Mapping[str, Any]) -> Any:
    """The number of experts; transformers >= 5 writes another name than the configs on the hub have."""
    name = "n_routed_experts" if hf["model_type"] in WITH_SHARED_EXPERTS else "num_experts"
    return hf.get("num_local_experts", hf[name])


def _latent_args(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Attention over a compressed key and value (arXiv:2405.04434)."""
    if hf["model_type"] not in LATENT:
        return {}
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf["num_attention_heads"],
        "kv_channels": hf["v_head_dim"],
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _variant_args(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of linear attention (arXiv:2412.06464) between others, or attention to chosen keys (DeepSeek-V3.2)."""
    if hf["model_type"] in SPARSE:
        return {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": hf["index_n_heads"],
            "dsa_indexer_head_dim": hf["index_head_dim"],
            "dsa_indexer_topk": hf["index_topk"],
        }
    if hf["model_type"] not in DELTA_NET:
        return {"experimental_attention_variant": None}
    pattern, every = _linear_layers(hf), hf.get("full_attention_interval", 4)
    is_regular = pattern == linear_attention_pattern(every, len(pattern))
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": every if is_regular else pattern,
        **{name: hf[name] for name in _DELTA_NET_SIZES},
    }


def indexer_types(hf: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return "full" for each layer that has an indexer, "shared" for each that takes an earlier one's choice."""
    if hf.get("indexer_types"):
        return list(hf["indexer_types"])[:num_layers]
    if pattern := hf.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern][:num_layers]
    every, offset = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]


def _linear_layers(hf: Mapping[str, Any]) -> list[int]:
    """1 for each layer with linear attention; transformers lists the kind of every layer."""
    layers = hf["num_hidden_layers"]
    if not hf.get("layer_types"):
        return linear_attention_pattern(hf.get("full_attention_interval", 4), layers)
    return [int(kind == "linear_attention") for kind in hf["layer_types"]]


def _moe_args(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["model_type"] in WITH_SHARED_EXPERTS:
        return _shared_moe_args(hf)
    if hf["model_type"] == "minimax_m2":
        return _minimax_moe_args(hf)
    if hf["model_type"] not in QWEN_MOE:
        return {"num_moe_experts": None, "moe_ffn_hidden_size": None}
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or []
    pattern = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    return {
        "num_moe_experts": _num_experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # HF: softmax over all experts, the best k, divided by their sum. That is a softmax over the best k alone,
        # which is what Megatron computes without pre-softmax; with it, the k are not divided by their sum.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        # transformers adds the load-balancing loss only when it is told to return the router's logits.
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.001) if hf.get("output_router_logits") else 0.0,
        # Qwen2's shared expert is weighted token by token, by the sigmoid of one more output of the router.
        "moe_shared_expert_intermediate_size": hf.get("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": hf["model_type"] in _WITH_SHARED_GATE,
    }


def _shared_moe_args(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of DeepSeek-V3's kind (arXiv:2412.19437): sigmoid scores, a bias for the choice, shared experts."""
    dense, layers = _num_dense_layers(hf), hf["num_hidden_layers"]
    has_groups, scale = hf["n_group"] > 1, float(hf["routed_scaling_factor"])
    return {
        "num_moe_experts": _num_experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": hf["n_group"] if has_groups else None,
        "moe_router_group_topk": hf["topk_group"] if has_groups else None,
        "moe_router_topk_scaling_factor": scale if scale != 1 else None,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # pre-training balances the load with it; here it is the model's
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_shared_expert_gate": False,
        "moe_aux_loss_coeff": 0.0,
    }


def _minimax_moe_args(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in every layer: sigmoid scores, and a bias for the choice."""
    return {
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_layer_freq": 1,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.001) if hf.get("output_router_logits") else 0.0,
    }


def _num_dense_layers(hf: Mapping[str, Any]) -> int:
    """How many layers before those with experts; transformers >= 5 lists the kind of every layer of some families."""
    kinds = list(hf.get("mlp_layer_types") or ["dense"])
    number: int | None = hf.get("first_k_dense_replace")
    return kinds.count("dense") if number is None else number


def _underivable_features(hf: Mapping[str, Any]) -> list[str]:
    """One sentence for each feature that no Megatron flag expresses."""
    model_type = hf["model_type"]
    found = {
        **dict.fromkeys(missing_rope_features(hf), True),
        f"hidden_act {hf.get('hidden_act')!r}": hf.get("hidden_act", "silu") != "silu",
        # Where transformers reads it, but for GLM, the output projection has a bias, too. MiMo says what Qwen2 is.
        "attention_bias": bool(hf.get("attention_bias")) and model_type not in ("glm4", "glm4_moe", "mimo"),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        # transformers does not read it, engines do
        "dual_chunk_attention_config": bool(hf.get("dual_chunk_attention_config")),
        # The weight of the chosen expert, divided by itself: always 1, and the router is never trained.
        "num_experts_per_tok 1 with norm_topk_prob": hf.get("num_experts_per_tok") == 1
        and (model_type == "minimax_m2" or bool(hf.get("norm_topk_prob"))),
    }
    if model_type == "minimax_m2":
        partial = rope_of(hf)["partial_rotary_factor"]
        head = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
        whole = hf.get("rotary_dim") is None or hf["rotary_dim"] == partial * head
        found |= {
            f"rotary_dim {hf.get('rotary_dim')} and partial_rotary_factor {partial} of head_dim {head}": not whole,
            "use_qk_norm false": not hf.get("use_qk_norm", True),
            f"qk_norm_type {hf.get('qk_norm_type')!r}": hf.get("qk_norm_type", "per_layer") != "per_layer",
            "use_routing_bias false": not hf.get("use_routing_bias", True),
            f"scoring_func {hf.get('scoring_func')!r}": hf.get("scoring_func", "sigmoid") != "sigmoid",
            "attn_type_list with other attention than full": not all(hf.get("attn_type_list") or [1]),
            f"shared_intermediate_size {hf.get('shared_intermediate_size')}": bool(hf.get("shared_intermediate_size")),
        }
    if model_type in DELTA_NET:
        kinds = set(hf.get("layer_types") or ()) - {"linear_attention", "full_attention"}
        length = len(_linear_layers(hf))
        found |= {
            f"layer_types with {', '.join(sorted(kinds))}": bool(kinds),
            f"{length} layer_types for {hf['num_hidden_layers']} layers": length != hf["num_hidden_layers"],
        }
    if model_type in SPARSE:
        kinds = set(indexer_types(hf, hf["num_hidden_layers"])[:1])
        found |= {f"a first layer whose indexer is {', '.join(kinds)}": kinds != {"full"}}
    if model_type in WITH_SHARED_EXPERTS:
        groups, per_tok = hf["topk_group"], hf["num_experts_per_tok"]
        found |= {
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
    return [
        f"the HF config has {name}, which our model of this family does not have."
        for name, is_so in found.items()
        if is_so
    ]


def _begins_with_dense_layers(hf: Mapping[str, Any]) -> bool:
    dense = _num_dense_layers(hf)
    expected = ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense)
    return list(hf.get("mlp_layer_types") or expected) == expected


def unsupported_model(hf_config: Mapping[str, Any], *, has_own_layers: bool = False) -> list[str]:
    """Return a sentence for everything in the HF config for which a model cannot be trained yet.

    With `has_own_layers` the user says what its layers are (--spec) and which weight rules hold (--model-name): the
    model_type may be any.
    """
    quantization = quantization_config_of(hf_config)
    method = str(quantization.get("quant_method")) if quantization and isinstance(quantization, Mapping) else None
    model_type = hf_config.get("model_type")
    in_blocks = isinstance(quantization, Mapping) and bool(quantization.get("weight_block_size"))
    problem = unsupported_family(model_type, method, in_blocks=in_blocks)
    if problem and has_own_layers and model_type not in SUPPORTED_MODEL_TYPES:
        problem = _unsupported_beyond(model_type, method)
    if problem:
        return [problem]
    try:
        weight_format_of(hf_config)
    except UsageError as error:
        return error.messages
    return []


def _unsupported_beyond(model_type: Any, quant_method: str | None) -> str | None:
    if quant_method is None:
        return None
    return (
        f"a quantised checkpoint ({quant_method}) of model_type {model_type!r} is not supported: nobody has compared "
        "which of its weights engines keep so with what a sync quantises; take one in 16 bit."
    )


def unsupported_family(model_type: Any, quant_method: str | None = None, *, in_blocks: bool = True) -> str | None:
    """Return why models of this model_type, quantised so, cannot be trained; None where they can.

    Args:
        in_blocks: fp8 weights have a scale for each block, not one for the whole tensor.
    """
    if model_type not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        return (
            f"model_type {model_type!r} of the HF config is not supported; use {known}, or train it with --spec and "
            "--model-name (docs/architectures_beyond_megatron.md)."
        )
    if quant_method and model_type in (WITHOUT_FP8 if quant_method == "fp8" else WITHOUT_INT4):
        return (
            f"a quantised checkpoint ({quant_method}) of model_type {model_type!r} is not supported: which of its "
            "weights engines keep so was not compared with what a sync quantises; take one in 16 bit "
            "(tools/fp8_cast_bf16.py and tools/convert_k2_thinking_int4_to_bf16.py make one of it)."
        )
    if quant_method and model_type in SPARSE and not in_blocks:
        return (
            f"fp8 weights of model_type {model_type!r} with one scale a tensor are not supported: SGLang reads those "
            "of its indexer in blocks alone; take a checkpoint with weight_block_size (tools/convert_hf_to_fp8.py "
            "--strategy block makes one)."
        )
    return None
