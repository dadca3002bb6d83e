"""Layers that no weight rules load yet compute what transformers does: GLM-4 norms and rotation, Qwen3-MoE routing."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.hf_config import model_args_from_hf
from slime.backends.megatron_utils.megatron_to_hf.rules import FAMILIES, TensorShape
from tests.unit.megatron_fakes import make_args, packed, run_world

LENGTHS = [5, 1, 9]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


def random_hf_model(model_type: str, **settings: Any) -> Any:
    """A model with random weights in which no norm and no bias is neutral."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **SIZES, **settings, dtype="float32")
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_((1 if "norm" in name else 0) + 0.1 * torch.randn_like(param))
    return model.eval()


def megatron_tensor(name: str, hf: dict[str, torch.Tensor], shape: TensorShape) -> torch.Tensor:
    """The HF weights of one Megatron parameter."""
    layer = ".".join(name.split(".")[:3]).replace("decoder", "model")
    own_names = {
        "post_self_attn_layernorm.weight": f"{layer}.post_self_attn_layernorm.weight",
        "post_mlp_layernorm.weight": f"{layer}.post_mlp_layernorm.weight",
        "mlp.linear_fc1.weight": f"{layer}.mlp.gate_up_proj.weight",  # GLM-4 has gate and up in one
        "mlp.router.weight": f"{layer}.mlp.gate.weight",
    }
    inner = name.split(".", 3)[-1]
    if "local_experts" in name:
        expert, linear = inner.split(".")[3:5]
        return hf[f"{layer}.mlp.experts.{'gate_up' if linear == 'linear_fc1' else 'down'}_proj"][int(expert)]
    if own_names.get(inner) in hf:
        return hf[own_names[inner]]
    rules = {"qkv": "qwen2", "q_layernorm": "qwen3", "k_layernorm": "qwen3"}
    family = next((family for part, family in rules.items() if part in name), "llama")
    rule, hf_names = FAMILIES[family].find(name)
    return rule.layout.to_megatron([hf[hf_name] for hf_name in hf_names], shape)


def check_logits(
    args: argparse.Namespace, hf: dict[str, torch.Tensor], ids: torch.Tensor, expected: torch.Tensor
) -> None:
    from slime.backends.megatron_utils.model_provider import build_gpt

    model = build_gpt(args)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(megatron_tensor(name, hf, TensorShape.of(args)))
        logits = model(ids, None, None, packed_seq_params=packed(LENGTHS))
    assert (logits - expected).abs().max() < 1e-5
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("glm4", {}),
        ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.25}),
        ("qwen3_moe", MOE | {"norm_topk_prob": True}),
        ("qwen3_moe", MOE | {"norm_topk_prob": False}),
    ],
)
def test_logits_equal_those_of_the_hf_model(model_type, settings):
    model = random_hf_model(model_type, **settings)
    ids = torch.randint(0, 128, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    args = make_args(None, **model_args_from_hf(model.config.to_dict()))
    run_world(1, check_logits, args, model.state_dict(), ids, expected)
