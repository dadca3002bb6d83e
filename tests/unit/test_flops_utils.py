"""FLOPs counted by hand for one tiny layer, and by torch for whole models of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.utils.flops_utils import calculate_fwd_flops, calculate_prediction_flops
from tests.unit.megatron_fakes import make_args, make_hf_model

LENGTHS = (10, 23)


def sizes(**changes: Any) -> SimpleNamespace:
    values = {
        "num_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 2,
        "group_query_attention": True,
        "num_query_groups": 1,
        "kv_channels": 3,
        "ffn_hidden_size": 5,
        "swiglu": True,
        "padded_vocab_size": 7,
    }
    return SimpleNamespace(**(values | changes))


def test_one_layer_by_hand():
    n, hidden, query, key, ffn, vocab = 10, 4, 6, 3, 5, 7
    projections = 2 * n * hidden * (query + key + key) + 2 * n * query * hidden
    attention = 2 * (2 * n * n * query) / 2
    mlp = 3 * 2 * n * hidden * ffn
    assert calculate_fwd_flops([n], sizes()) == projections + attention + mlp + 2 * n * hidden * vocab


def test_a_layer_that_predicts_is_trained_like_a_layer_but_for_the_output_layers_weights():
    n, num_predicted, hidden, vocab = 10, 6, 4, 7
    layer = calculate_fwd_flops([n], sizes(num_layers=2)) - calculate_fwd_flops([n], sizes())
    projection = 2 * n * (2 * hidden) * hidden
    head = 2 * num_predicted * hidden * vocab  # forward, and as much for the gradient of its input
    expected = 3 * (layer + projection) + 2 * head
    assert calculate_prediction_flops([n], num_predicted, sizes(mtp_num_layers=1)) == expected
    assert calculate_prediction_flops([n], num_predicted, sizes(mtp_num_layers=2)) == 2 * expected
    assert calculate_prediction_flops([n], num_predicted, sizes()) == 0
    assert calculate_fwd_flops([n], sizes(mtp_num_layers=1)) == calculate_fwd_flops([n], sizes())


def test_attention_does_not_cross_sequences():
    assert calculate_fwd_flops([10, 10], sizes()) == 2 * calculate_fwd_flops([10], sizes())
    assert calculate_fwd_flops([20], sizes()) > calculate_fwd_flops([10, 10], sizes())


def test_layers_and_ungated_mlp_are_counted():
    per_layer = calculate_fwd_flops([8], sizes(num_layers=2)) - calculate_fwd_flops([8], sizes())
    ungated = calculate_fwd_flops([8], sizes(num_layers=2, swiglu=False)) - calculate_fwd_flops(
        [8], sizes(swiglu=False)
    )
    assert per_layer - ungated == 2 * 8 * 4 * 5


def test_only_the_experts_that_a_token_goes_through_count():
    moe = {"num_moe_experts": 4, "moe_ffn_hidden_size": 5, "moe_router_topk": 2}
    n, hidden, ffn, router = 8, 4, 5, 4
    extra = calculate_fwd_flops([n], sizes(**moe)) - calculate_fwd_flops([n], sizes())
    assert extra == 2 * n * (router * hidden + 3 * hidden * ffn), "a router, and a second expert"
    idle = {"num_moe_experts": 8}
    assert calculate_fwd_flops([n], sizes(**moe | idle)) - calculate_fwd_flops([n], sizes(**moe)) == 2 * n * 4 * hidden


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("glm4", {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("mimo", {}),
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("glm4_moe_lite", {}),
        ("kimi_k2", {}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None}),
    ],
)
def test_a_model_of_transformers_multiplies_as_often(family: str, config: dict[str, Any], tmp_path: Path):
    """torch counts the products of a real forward pass: those with weights, and those inside attention."""
    model = make_hf_model(tmp_path, family, vocab=128, attn_implementation="eager", **config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # a product per expert and its tokens, which torch can count
    weights = attention = 0
    for length in LENGTHS:
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.randint(128, (1, length)), use_cache=False)
        counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
        rotary = model.model.rotary_emb.inv_freq.numel() * 2 * length  # transformers' angles: one batched product
        weights += counts.pop("aten.mm", 0) + counts.pop("aten.addmm", 0)
        attention += counts.pop("aten.bmm") - rotary
        assert not counts, "every kind of product is compared"
    args = make_args(tmp_path)
    # transformers computes the masked half of attention, too
    assert calculate_fwd_flops(LENGTHS, args) == weights + attention / 2
