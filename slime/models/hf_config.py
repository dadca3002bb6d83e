"""What a Hugging Face config.json means in Megatron's terms, and whether the model flags that were given agree.

Everything works on the plain dict of config.json, without Megatron, transformers or weights. What differs from family
to family is in their rows (slime.models.families).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime.models.families import FAMILIES, family_of_config
from slime.models.family import Family, resolved
from slime.models.rope import missing_rope_features, rope_args, rope_numbers
from slime.utils.errors import UsageError, refuse
from slime.utils.model_shape import linear_attention_pattern
from slime.weights.formats import quantization_config_of, weight_format_of
from slime.weights.names import text_config

if TYPE_CHECKING:
    from slime.config.args import Args

SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
"""`model_type`s that can be trained: their Megatron flags follow from the config, and their weights have rules."""

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
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


def model_args_from_hf(hf_config: Mapping[str, Any], takes_any: bool = False) -> dict[str, Any]:
    """Return the Megatron model flags that build this HF model: {attribute: value}.

    With `takes_any` (FSDP2, whose model is transformers') they are only the sizes where no flags would build it.

    Raises:
        UsageError: for a model_type that cannot be trained, a feature of the config that Megatron's model does not
            have, or a config in which numbers are missing.
    """
    family = family_of_config(hf_config)
    if family is None:
        if takes_any:
            return _sizes_of_any(text_config(hf_config))
        raise UsageError(
            f"model_type {hf_config.get('model_type')!r} of the HF config: its Megatron flags cannot be derived, only "
            f"those of {', '.join(SUPPORTED_MODEL_TYPES)}; give them yourself (as scripts/models/*.sh) instead of "
            "--model-args-from-hf."
        )
    hf = family.read(hf_config)
    refuse(_number_problems(hf, family))
    if problems := _underivable_features(hf, family):
        if takes_any:
            return _sizes_of_any(hf)
        raise UsageError(problems)
    values = {
        **_sizes(hf),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "layernorm_zero_centered_gamma": False,
        "attention_output_gate": False,
        "qk_layernorm": bool(hf.get("use_qk_norm")),
        "post_self_attn_layernorm": False,
        "post_mlp_layernorm": False,
        "position_embedding_type": "rope",
        "experimental_attention_variant": None,
        "num_moe_experts": None,
        "moe_ffn_hidden_size": None,
    }
    values |= rope_args(hf, family)
    for part in family.parts:
        values |= resolved(part.flags, hf)
    return values


def _sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "vocab_size": hf["vocab_size"],
        "max_position_embeddings": hf.get("max_position_embeddings", 4096),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", False),
    }


def _sizes_of_any(hf: Mapping[str, Any]) -> dict[str, Any]:
    refuse(_number_problems(hf, None))
    return {
        **_sizes(hf),
        "swiglu": True,
        "add_bias_linear": False,
        "num_moe_experts": hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts"),
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "moe_router_topk": hf.get("num_experts_per_tok") or 2,
    }


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
    family = family_of_config(hf_config)
    parts = [part for part in family.parts if spec and spec[-1] in part.specs] if family else []
    names = [flag for part in parts for flag in part.flags]
    names += LATENT_ROPE if has_latent_attention else ()
    if family is None or not names:
        return {}
    try:
        values = model_args_from_hf(hf_config)
    except UsageError:
        return {}  # said where the flags are compared with the config
    return {name: values[name] for name in names if values.get(name) is not None}


def _number_problems(hf: Mapping[str, Any], family: Family | None) -> list[str]:
    """One sentence for each number that is missing or cannot be one."""
    parts = family.parts if family is not None else ()
    values = {name: hf.get(name) for name in (*_SIZES, *(name for part in parts for name in part.needs))}
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


def _underivable_features(hf: Mapping[str, Any], family: Family) -> list[str]:
    """One sentence for each feature that no Megatron flag expresses."""
    found = {
        **dict.fromkeys(missing_rope_features(hf, family), True),
        f"hidden_act {hf.get('hidden_act')!r}": hf.get("hidden_act", "silu") != "silu",
        # Where transformers reads it, but for GLM, the output projection has a bias, too.
        "attention_bias": bool(hf.get("attention_bias")) and "attention_bias" not in family.takes,
        "mlp_bias": bool(hf.get("mlp_bias")),
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        # transformers does not read it, engines do
        "dual_chunk_attention_config": bool(hf.get("dual_chunk_attention_config")),
        # The weight of the chosen expert, divided by itself: always 1, and the router is never trained.
        "num_experts_per_tok 1 with norm_topk_prob": hf.get("num_experts_per_tok") == 1
        and bool(hf.get("norm_topk_prob")),
    }
    for part in family.parts:
        found |= part.refuses(hf)
    return [
        f"the HF config has {name}, which our model of this family does not have."
        for name, is_so in found.items()
        if is_so
    ]


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
    family = FAMILIES[model_type]
    if quant_method and not (family.has_fp8 if quant_method == "fp8" else family.has_int4):
        return (
            f"a quantised checkpoint ({quant_method}) of model_type {model_type!r} is not supported: which of its "
            "weights engines keep so was not compared with what a sync quantises; take one in 16 bit "
            "(tools/fp8_cast_bf16.py and tools/convert_k2_thinking_int4_to_bf16.py make one of it)."
        )
    if quant_method and family.needs_fp8_blocks and not in_blocks:
        return (
            f"fp8 weights of model_type {model_type!r} with one scale a tensor are not supported: SGLang reads those "
            "of its indexer in blocks alone; take a checkpoint with weight_block_size (tools/convert_hf_to_fp8.py "
            "--strategy block makes one)."
        )
    return None


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
    family = family_of_config(hf_config)
    if family is None:
        return list(_plain_mismatches(args, text_config(hf_config)))
    try:
        differences = config_differences(args, hf_config)
    except UsageError as error:
        return error.messages
    predicting, theirs = args.mtp_num_layers or 0, text_config(hf_config).get("num_nextn_predict_layers") or 0
    if predicting > theirs or (predicting and not family.predicts):
        what = (
            f"--mtp-num-layers {predicting}: the HF config (model_type {family.model_type}) has {theirs} layers that"
        )
        what += " predict further tokens (num_nextn_predict_layers)"
        if not family.predicts:
            known = ", ".join(name for name, row in FAMILIES.own.items() if row.predicts)
            return [f"{what}, and there are rules for those of {known}; leave it out."]
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
