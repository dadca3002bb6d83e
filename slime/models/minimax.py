"""MiniMax-M2: experts in every layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from operator import attrgetter, itemgetter

from slime.models.family import (
    ATTENTION,
    BASE,
    QK_NORM,
    SIGMOID_ROUTER,
    Config,
    Part,
    aux_loss_coeff,
    family_of_parts,
    layer_rule,
)
from slime.models.layouts import GateUp
from slime.models.rope import rope_of


def _other_features(hf: Config) -> dict[str, bool]:
    partial = rope_of(hf)["partial_rotary_factor"]
    head = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    whole = hf.get("rotary_dim") is None or hf["rotary_dim"] == partial * head
    return {
        # The weight of the chosen expert, divided by itself: always 1, and the router is never trained.
        "num_experts_per_tok 1 with norm_topk_prob": hf["num_experts_per_tok"] == 1,
        f"rotary_dim {hf.get('rotary_dim')} and partial_rotary_factor {partial} of head_dim {head}": not whole,
        "use_qk_norm false": not hf.get("use_qk_norm", True),
        f"qk_norm_type {hf.get('qk_norm_type')!r}": hf.get("qk_norm_type", "per_layer") != "per_layer",
        "use_routing_bias false": not hf.get("use_routing_bias", True),
        f"scoring_func {hf.get('scoring_func')!r}": hf.get("scoring_func", "sigmoid") != "sigmoid",
        "attn_type_list with other attention than full": not all(hf.get("attn_type_list") or [1]),
        f"shared_intermediate_size {hf.get('shared_intermediate_size')}": bool(hf.get("shared_intermediate_size")),
    }


_EXPERTS = Part(
    (
        layer_rule("mlp.router.weight", "block_sparse_moe.gate.weight"),
        layer_rule("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
        layer_rule(
            "mlp.experts.local_experts.{e}.linear_fc1.weight",
            *(f"block_sparse_moe.experts.{{e}}.{n}.weight" for n in ("w1", "w3")),
            layout=GateUp(),
        ),
        layer_rule("mlp.experts.local_experts.{e}.linear_fc2.weight", "block_sparse_moe.experts.{e}.w2.weight"),
    ),
    needs=("num_local_experts", "num_experts_per_tok"),
    flags={
        **SIGMOID_ROUTER,
        "spec": ["slime_plugins.models.minimax_m2", "get_minimax_m2_spec"],  # its norms
        "num_moe_experts": itemgetter("num_local_experts"),
        "moe_ffn_hidden_size": itemgetter("intermediate_size"),
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": None,
        "moe_aux_loss_coeff": aux_loss_coeff,
    },
    refuses=_other_features,
)
_SGLANG_NEEDS = {"rotary_dim": 64, "use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}
MINIMAX = family_of_parts(
    "minimax_m2",
    *(BASE, ATTENTION, QK_NORM, _EXPERTS),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    rope_theta=5e6,
    takes=("partial_rotary_factor",),
    hf_class="MiniMaxM2",
    tiny={
        **{"moe_intermediate_size": attrgetter("expert_ffn_size"), "num_experts_per_tok": 2},
        **{"num_local_experts": attrgetter("experts"), "partial_rotary_factor": 0.5},
        # SGLang reads these, transformers does not
        **_SGLANG_NEEDS,
        "rotary_dim": lambda sizes: (sizes.head_dim or sizes.hidden_size // sizes.heads) // 2,
    },
    sglang_needs=_SGLANG_NEEDS,
    norms_all_heads=True,
    gguf_type=None,
)
