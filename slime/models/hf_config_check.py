"""Whether the model flags that were given agree with a Hugging Face config.json.

What the config means in Megatron's terms is slime.models.hf_config's; files it opens none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime.models.hf_config import (
    SUPPORTED_MODEL_TYPES,
    model_args_from_hf,
    moe_layer_pattern,
)
from slime.utils.errors import UsageError
from slime.utils.hf_text_config import text_config
from slime.utils.model_shape import linear_attention_pattern

if TYPE_CHECKING:
    from slime.config.args import Args


PREDICTING = ("mimo", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
"""`model_type`s with rules for layers that predict further tokens."""

FLAG_OF = {
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "num_moe_experts": "--num-experts",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}
# A wrong value of these makes another model; the others (vocabulary, positions) are limits that a user may widen, or
# change the training and not the model (the load-balancing loss).
CROSS_CHECKED = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "softmax_scale",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "layernorm_zero_centered_gamma",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "spec",
]

# What a model has whose config does not speak of these at all.
LEFT_OUT: dict[str, Any] = {
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "softmax_scale": None,
}
ONE_IS_NONE = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor")


def flag_of(attribute: str) -> str:
    """Return the option string of a Megatron attribute."""
    return FLAG_OF.get(attribute, "--" + attribute.replace("_", "-"))


def config_mismatches(args: Args, hf_config: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each model flag that disagrees with the HF config (all of them, not the first).

    Of a config of a type without a translation only that is compared which no shape of a weight would tell.
    """
    if hf_config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return list(_plain_mismatches(args, text_config(hf_config)))
    try:
        differences = config_differences(args, hf_config)
    except UsageError as error:
        return error.messages
    predicting, theirs = args.mtp_num_layers or 0, text_config(hf_config).get("num_nextn_predict_layers") or 0
    kind = hf_config["model_type"]
    if predicting > theirs or (predicting and kind not in PREDICTING):
        what = f"--mtp-num-layers {predicting}: the HF config (model_type {kind}) has {theirs} layers that predict"
        what += " further tokens (num_nextn_predict_layers)"
        if kind not in PREDICTING:
            return [f"{what}, and there are rules for those of {', '.join(PREDICTING)}; leave it out."]
        return [f"{what}; give {theirs} or leave it out." if theirs else f"{what}; leave it out."]
    names = {name for name, _, _ in differences}
    if "multi_latent_attention" in names:  # the width of a head follows from it
        differences = [one for one in differences if one[0] != "kv_channels"]
    takes_config = vars(args).get("model_args_from_hf")
    return [
        f"{flag_of(name)}: the flags say {ours}, the HF config says {theirs}; correct the flag or "
        f"{'leave it out' if name == 'vocab_size' or takes_config else 'give --model-args-from-hf'}."
        for name, ours, theirs in differences
    ]


def _plain_mismatches(args: Args, hf: Mapping[str, Any]) -> Iterator[str]:
    """What configs of most architectures say under the same name, and weights of these shapes do not."""
    expected = {
        "num_layers": hf.get("num_hidden_layers"),
        "layernorm_epsilon": hf.get("rms_norm_eps", hf.get("norm_eps")),
        "untie_embeddings_and_output_weights": None
        if hf.get("tie_word_embeddings") is None
        else not hf["tie_word_embeddings"],
    }
    for name, theirs in expected.items():
        if theirs is not None and vars(args)[name] != theirs:
            yield f"{flag_of(name)}: the flags say {vars(args)[name]}, the HF config says {theirs}; correct the flag."
    if hf.get("hidden_act", "silu") != "silu":
        yield f"the HF config has hidden_act {hf['hidden_act']!r}, and our MLP computes silu (--swiglu)."


def config_differences(args: Args, hf_config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(attribute, value of the flags, value of the HF config) of everything that makes them two models.

    Raises:
        UsageError: as `model_args_from_hf`.
    """
    expected = LEFT_OUT | model_args_from_hf(hf_config)
    given = LEFT_OUT | vars(args) | _as_built(vars(args))
    if "moe_layer_freq" in expected:
        expected["moe_layer_freq"] = moe_layer_pattern(expected["moe_layer_freq"], expected["num_layers"])
    if "linear_attention_freq" in expected:
        layers = expected["num_layers"]
        expected["linear_attention_freq"] = linear_attention_pattern(expected["linear_attention_freq"], layers)
    names = [*CROSS_CHECKED, *(["vocab_size"] if given["vocab_size"] is not None else [])]
    return [
        (name, given[name], expected[name])
        for name in names
        if name in expected
        and given[name] != expected[name]
        and not (name == "add_qkv_bias" and given.get("multi_latent_attention"))  # has none in either case
        and not (name in ONE_IS_NONE and {given[name], expected[name]} <= {None, 1})
        and (given["num_moe_experts"] or not name.startswith("moe_router_"))  # nothing routes: said elsewhere
    ]


def _as_built(given: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron makes of flags that were left out."""
    built: dict[str, Any] = {}
    if given.get("multi_latent_attention") and given["rope_type"] is None:
        built["rope_type"] = "yarn"
    is_scaled = given.get("rotary_scaling_factor") != 1
    if given.get("multi_latent_attention") and given["rope_type"] == "yarn" and not is_scaled:
        built["rope_type"] = "rope"
    if (given.get("spec") or [None])[-1] == "get_minimax_m2_layer_spec":
        built["spec"] = [given["spec"][0], "get_minimax_m2_spec"]
    if not given["group_query_attention"]:
        built["num_query_groups"] = given["num_attention_heads"]
    if given["kv_channels"] is None and given["hidden_size"] and given["num_attention_heads"]:
        built["kv_channels"] = given["hidden_size"] // given["num_attention_heads"]
    if given.get("linear_attention_freq") is not None:
        built["linear_attention_freq"] = linear_attention_pattern(given["linear_attention_freq"], given["num_layers"])
    if given["num_moe_experts"]:
        built["moe_ffn_hidden_size"] = given["moe_ffn_hidden_size"] or given["ffn_hidden_size"]
        built["moe_layer_freq"] = moe_layer_pattern(given["moe_layer_freq"], given["num_layers"])
    return built
