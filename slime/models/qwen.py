"""Qwen2, Qwen3, Qwen3-Next and Qwen3.5, dense and with experts; MiMo, which is Qwen2 with prediction layers."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

from slime.models.family import (
    ATTENTION,
    BASE,
    EXPERT_RULES,
    MLP,
    QK_NORM,
    Config,
    Part,
    Predictions,
    aux_loss_coeff,
    family_of_parts,
    layer_rule,
    mlp_rules,
    qkv_bias,
)
from slime.models.layouts import DeltaNetConv, DeltaNetRows, DeltaNetRowsApart, GatedQkv, Layout, SwappedHalves
from slime.utils.model_shape import linear_attention_pattern


def _expert_layers(hf: Config) -> int | list[int]:
    """Which layers have experts, as Megatron's --moe-layer-freq."""
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or []
    pattern = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    return 1 if all(pattern) else pattern


EXPERTS = Part(
    EXPERT_RULES,
    needs=("num_experts_per_tok", "moe_intermediate_size", "num_experts", "decoder_sparse_step"),
    # transformers >= 5 writes another name than the configs on the hub have
    reads=lambda hf: {"num_experts": hf.get("num_local_experts", hf["num_experts"])},
    flags={
        "num_moe_experts": itemgetter("num_experts"),
        "moe_ffn_hidden_size": itemgetter("moe_intermediate_size"),
        "moe_layer_freq": _expert_layers,
        "moe_router_topk": itemgetter("num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        # HF: softmax over all experts, the best k, divided by their sum. That is a softmax over the best k alone,
        # which is what Megatron computes without pre-softmax; with it, the k are not divided by their sum.
        "moe_router_pre_softmax": lambda hf: not hf["norm_topk_prob"],
        "moe_aux_loss_coeff": aux_loss_coeff,
        "moe_shared_expert_intermediate_size": lambda hf: hf.get("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": False,
    },
    tiny={
        "moe_intermediate_size": attrgetter("expert_ffn_size"),
        "num_experts_per_tok": 2,
        "num_experts": attrgetter("experts"),
    },
)
GATED_SHARED_EXPERT = Part(
    (
        *mlp_rules("mlp.shared_experts", "mlp.shared_expert"),
        layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ),
    needs=("shared_expert_intermediate_size",),
    # It is weighted token by token, by the sigmoid of one more output of the router.
    flags={"moe_shared_expert_gate": True},
    tiny={"shared_expert_intermediate_size": attrgetter("expert_ffn_size")},
)
EXPERTS_EVERYWHERE = Part(
    reads=lambda hf: {
        "intermediate_size": hf["moe_intermediate_size"],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        **hf,
    }
)
"""All layers have experts, and the config has no width of others."""
GATED_ATTENTION = Part(
    (
        layer_rule(
            "self_attention.linear_qkv.weight", *(f"self_attn.{n}_proj.weight" for n in "qkv"), layout=GatedQkv()
        ),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ),
    flags={"layernorm_zero_centered_gamma": True, "attention_output_gate": True},
)
_DELTA_NET_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def _linear_layers(hf: Config) -> list[int]:
    """1 for each layer with linear attention; transformers lists the kind of every layer."""
    if not hf.get("layer_types"):
        return linear_attention_pattern(hf["full_attention_interval"], hf["num_hidden_layers"])
    return [int(kind == "linear_attention") for kind in hf["layer_types"]]


def _linear_attention_freq(hf: Config) -> int | list[int]:
    pattern, every = _linear_layers(hf), hf["full_attention_interval"]
    return every if pattern == linear_attention_pattern(every, len(pattern)) else pattern


def _other_layers(hf: Config) -> dict[str, bool]:
    kinds = set(hf.get("layer_types") or ()) - {"linear_attention", "full_attention"}
    length, layers = len(_linear_layers(hf)), hf["num_hidden_layers"]
    return {
        f"layer_types with {', '.join(sorted(kinds))}": bool(kinds),
        f"{length} layer_types for {layers} layers": length != layers,
    }


def _delta_net(in_proj: tuple[str, ...], layout: Layout) -> Part:
    """Layers of linear attention (arXiv:2412.06464) between others; Megatron calls both self_attention."""
    return Part(
        (
            layer_rule("self_attention.in_proj.weight", *(f"linear_attn.{n}.weight" for n in in_proj), layout=layout),
            layer_rule("self_attention.conv1d.weight", "linear_attn.conv1d.weight", layout=DeltaNetConv()),
            layer_rule("self_attention.dt_bias", "linear_attn.dt_bias"),
            layer_rule("self_attention.A_log", "linear_attn.A_log"),
            layer_rule("self_attention.out_norm.weight", "linear_attn.norm.weight"),
            layer_rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
        ),
        needs=(*_DELTA_NET_SIZES, "full_attention_interval"),
        reads=lambda hf: {"full_attention_interval": hf.get("full_attention_interval", 4)},
        flags={
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": _linear_attention_freq,
            **{name: itemgetter(name) for name in _DELTA_NET_SIZES},
        },
        specs=("get_qwen3_5_spec", "get_qwen3_next_spec"),
        refuses=_other_layers,
        tiny={
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "full_attention_interval": 2},
            "partial_rotary_factor": 0.5,
        },
        has_fp8=False,
        has_int4=False,
        needs_gpu="SGLang's gated delta nets are kernels for GPUs and for CPUs with AMX",
    )


_HYBRID = (BASE, QK_NORM, MLP, GATED_ATTENTION)
_NEXT = (*_HYBRID, _delta_net(("in_proj_qkvz", "in_proj_ba"), DeltaNetRows()), EXPERTS, GATED_SHARED_EXPERT)
_DENSE_3_5 = (
    *_HYBRID,
    _delta_net(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), DeltaNetRowsApart()),
)
_MOE_3_5 = (*_DENSE_3_5, EXPERTS, GATED_SHARED_EXPERT, EXPERTS_EVERYWHERE)
_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_TINY_VISION = {"patch_size": 8, "num_position_embeddings": 64}
_FACTS_3_5: dict[str, Any] = {
    "tiny_vision": _TINY_VISION,
    "defaults": {"num_key_value_heads": 4, **_DELTA_NET_DEFAULTS},
    "takes": ("partial_rotary_factor",),
}
_MOE_FACTS_3_5: dict[str, Any] = {
    "tiny_vision": _TINY_VISION,
    "defaults": {
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        **_DELTA_NET_DEFAULTS,
    },
    "takes": ("partial_rotary_factor",),
}
# MiMo's join takes [hidden state, embedding], the others' [embedding, hidden state].
_MIMO_PREDICTIONS = Predictions(
    layer="model.mtp_layers.{k}",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    join="input_proj",
    join_layout=SwappedHalves(),
    last_norm="final_layernorm",
)
DENSE = (BASE, ATTENTION, MLP)


def _tiny_mrope(sizes: Any) -> dict[str, Any]:
    """Sections of multimodal positions (time, height, width) that fill half a head."""
    quarter = (sizes.head_dim or sizes.hidden_size // sizes.heads) // 4
    return {"mrope_section": [quarter, quarter // 2, quarter - quarter // 2]}


QWEN = (
    family_of_parts("qwen2", *DENSE, qkv_bias(), defaults={"num_key_value_heads": 32}, hf_class="Qwen2"),
    family_of_parts(
        "mimo",
        *DENSE,
        qkv_bias(),
        predictions=_MIMO_PREDICTIONS,
        defaults={"num_key_value_heads": 32},
        takes=("attention_bias",),  # it says what Qwen2 is
        hf_class="Qwen2",
        hf_type="qwen2",
        own_class="MiMo",
    ),
    family_of_parts("qwen3", *DENSE, QK_NORM, defaults={"num_key_value_heads": 32, "head_dim": 128}, hf_class="Qwen3"),
    family_of_parts(
        "qwen2_moe",
        *DENSE,
        qkv_bias("qkv_bias"),
        EXPERTS,
        GATED_SHARED_EXPERT,
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
        hf_class="Qwen2Moe",
        tiny={"shared_expert_intermediate_size": lambda sizes: 2 * sizes.expert_ffn_size},
        sglang_has_own_head=True,
        gguf_type="qwen2moe",
    ),
    family_of_parts(
        "qwen3_moe",
        *DENSE,
        QK_NORM,
        EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        hf_class="Qwen3Moe",
        tiny={"norm_topk_prob": True},
        sglang_has_own_head=True,
        gguf_type="qwen3moe",
    ),
    family_of_parts(
        "qwen3_next",
        *_NEXT,
        defaults={
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            **_DELTA_NET_DEFAULTS,
        },
        takes=("partial_rotary_factor",),
        hf_class="Qwen3Next",
        tiny_adds={"full_attention_interval": 2},
    ),
    family_of_parts(
        "qwen2_5_vl",
        *DENSE,
        qkv_bias(),
        sees_images=True,
        has_plain_names=True,
        defaults={"num_key_value_heads": 8},
        rope_theta=1000000.0,
        hf_class="Qwen2_5_VL",
        tiny={"rope_parameters": _tiny_mrope},
        # SGLang takes patches of another size for finished embeddings
        tiny_vision={
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": lambda sizes: [sizes.vision_layers - 1],
        },
        gguf_type=None,
    ),
    family_of_parts(
        "qwen3_vl",
        *DENSE,
        QK_NORM,
        sees_images=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        rope_theta=500000.0,
        hf_class="Qwen3VL",
        tiny={"rope_parameters": lambda sizes: {**_tiny_mrope(sizes), "mrope_interleaved": True}},
        tiny_vision={**_TINY_VISION, "deepstack_visual_indexes": [0]},
        gguf_type=None,
    ),
    family_of_parts("qwen3_5", *_DENSE_3_5, sees_images=True, hf_class="Qwen3_5", **_FACTS_3_5),
    family_of_parts("qwen3_5_text", *_DENSE_3_5, **_FACTS_3_5),
    family_of_parts("qwen3_5_moe", *_MOE_3_5, sees_images=True, hf_class="Qwen3_5Moe", **_MOE_FACTS_3_5),
    family_of_parts("qwen3_5_moe_text", *_MOE_3_5, **_MOE_FACTS_3_5),
)
