"""What a Hugging Face config.json means in Megatron's terms, and whether the flags agree with it.

It works on the plain dict of config.json; it imports neither Megatron nor transformers and opens no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.utils.errors import UsageError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""`model_type`s for which there is a rule table (weights) and a translation of the config (here)."""

FLAG_OF = {
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
# A wrong value of these makes another model; the others (vocabulary, positions) are limits that a user may widen.
CROSS_CHECKED = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "rotary_base",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
]


def flag_of(attribute: str) -> str:
    """Return the option string of a Megatron attribute."""
    return FLAG_OF.get(attribute, "--" + attribute.replace("_", "-"))


def model_args_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Megatron model flags that build this HF model: {attribute: value}.

    Raises:
        UsageError: for a model_type without a rule table, or a feature of the config that our model does not have.
    """
    model_type = hf_config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UsageError(
            f"model_type {model_type!r} of the HF config is not supported; only {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    if problems := _unsupported_features(hf_config):
        raise UsageError(problems)
    heads = hf_config["num_attention_heads"]
    values = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": hf_config.get("num_key_value_heads") or heads,
        "kv_channels": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "vocab_size": hf_config["vocab_size"],
        "max_position_embeddings": hf_config.get("max_position_embeddings", 4096),
        "layernorm_epsilon": hf_config.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": model_type == "qwen2",
        "qk_layernorm": model_type == "qwen3",
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False),
        "position_embedding_type": "rope",
    }
    return values | _rope_args(hf_config)


def _rope_of(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, as transformers >= 5 writes them (`rope_parameters`) or as older versions did."""
    rope = dict(hf_config.get("rope_scaling") or {}) | dict(hf_config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _rope_args(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope_of(hf_config)
    base = float(rope["rope_theta"])
    values: dict[str, Any] = {"rotary_base": int(base) if base.is_integer() else base}
    values["use_rope_scaling"] = rope["rope_type"] == "llama3"
    if values["use_rope_scaling"]:
        values["rope_scaling_factor"] = float(rope["factor"])
        values["rope_scaling_low_freq_factor"] = float(rope["low_freq_factor"])
        values["rope_scaling_high_freq_factor"] = float(rope["high_freq_factor"])
        values["rope_scaling_original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return values


def _unsupported_features(hf_config: Mapping[str, Any]) -> list[str]:
    rope = _rope_of(hf_config)
    found = {
        f"rotary embedding of type {rope['rope_type']!r}": rope["rope_type"] not in ("default", "llama3"),
        f"partial_rotary_factor {rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"hidden_act {hf_config.get('hidden_act')!r}": hf_config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf_config.get("attention_bias")),
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "quantization_config": bool(hf_config.get("quantization_config")),
    }
    return [
        f"the HF config has {name}, which our model of this family does not have."
        for name, is_so in found.items()
        if is_so
    ]


def config_mismatches(args: Any, hf_config: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each model flag that disagrees with the HF config (all of them, not the first)."""
    try:
        expected = model_args_from_hf(hf_config)
    except UsageError as error:
        return error.messages
    given = vars(args)
    if not given["group_query_attention"]:
        given = given | {"num_query_groups": given["num_attention_heads"]}
    if given["kv_channels"] is None and given["hidden_size"] and given["num_attention_heads"]:
        given = given | {"kv_channels": given["hidden_size"] // given["num_attention_heads"]}
    sentences = []
    for name in CROSS_CHECKED:
        if name in expected and given[name] != expected[name]:
            sentences.append(
                f"{flag_of(name)}: the flags say {given[name]}, the HF config says {expected[name]}; "
                "correct the flag or give --model-args-from-hf."
            )
    if given["vocab_size"] is not None and given["vocab_size"] != expected["vocab_size"]:
        sentences.append(
            f"--vocab-size: the flags say {given['vocab_size']}, the HF config says {expected['vocab_size']}; "
            "correct the flag or leave it out."
        )
    return sentences
