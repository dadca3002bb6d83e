"""FLOPs counted by hand for one tiny layer, and by torch for whole models of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.utils.flops_utils import calculate_fwd_flops, calculate_prediction_flops, calculate_train_flops
from slime_plugins.models.gated_delta_net import torch_delta_rule
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


DELTA_NET = {
    "num_layers": 4,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}


def test_a_delta_net_costs_the_same_for_each_token_however_long_the_sequence():
    n, hidden, keys, values, heads = 10, 4, 2 * 3, 4 * 5, 4
    projections = 2 * n * hidden * (2 * keys + 2 * values + 2 * heads) + 2 * n * values * hidden
    convolution = 2 * n * 4 * (2 * keys + values)
    state = n * heads * 3 * (2 * 3 * 5)  # read by the key, updated, read by the query
    attention = calculate_fwd_flops([n], sizes(num_layers=2)) - calculate_fwd_flops([n], sizes())
    mlp = 3 * 2 * n * hidden * 5
    linear_layer = projections + convolution + state + mlp
    output = 2 * n * hidden * 7
    assert calculate_fwd_flops([n], sizes(**DELTA_NET)) == 3 * linear_layer + attention + output
    longer = calculate_fwd_flops([20], sizes(**DELTA_NET)) - calculate_fwd_flops([10, 10], sizes(**DELTA_NET))
    assert longer == (6 + 6) * (20**2 - 2 * 10**2), "the one layer that attends"


def test_the_delta_rule_has_the_products_that_are_counted():
    """Step by step as the paper writes it: the numbers are those of the implementation that trains."""
    n, heads, d_key, d_value = 70, 2, 3, 5
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, heads, d_key, generator=generator) for _ in range(2))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    v, g = torch.randn(n, heads, d_value, generator=generator), -torch.rand(n, heads, generator=generator)
    beta = torch.rand(n, heads, generator=generator)
    counter, out = FlopCounterMode(display=False), torch.empty(n, heads, d_value)
    with counter:
        for head in range(heads):
            state = torch.zeros(d_key, d_value)
            for t in range(n):
                state = state * g[t, head].exp()
                found = k[t, head][None] @ state
                state = state + k[t, head][:, None] @ (beta[t, head] * (v[t, head] - found[0]))[None]
                out[t, head] = (q[t, head][None] @ state)[0] * d_key**-0.5
    assert counter.get_total_flops() == n * heads * 3 * 2 * d_key * d_value
    ours = torch_delta_rule(q, k, v, g, beta, torch.tensor([0, n]))
    torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-5)


def test_weights_under_adapters_get_no_gradients():
    n, attention = 40, 2 * 2 * 3 * 40 * 40  # two products of 2 x 3 channels over n x n pairs, half of them masked
    weights = calculate_fwd_flops([n], sizes()) - attention
    assert calculate_train_flops([n], sizes()) == 3 * weights + 3 * attention
    assert calculate_train_flops([n], sizes(lora_rank=2)) == 2 * weights + 3 * attention


SPARSE = {
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}
INDEXER = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 5,
    "dsa_indexer_topk": 16,
}


def test_sparse_attention_is_to_topk_keys_and_pays_for_choosing_them():
    n, topk, heads, head, hidden = 40, 16, 3, 5, 4
    dense, sparse = (calculate_fwd_flops([n], sizes(**SPARSE | more)) for more in ({}, INDEXER))
    keys = sum(min(t + 1, topk) for t in range(n))  # of each token
    channels = 2 * (3 + 2) + 2 * 4  # queries and values of two heads
    # The formula takes n^2 / 2 for n (n + 1) / 2 pairs under the causal mask, and so on both sides.
    unmasked = keys - topk / 2
    projections = 2 * n * (6 * heads * head + hidden * (head + heads))
    choosing = projections + 2 * heads * (head + 1) * n * n / 2
    assert dense - sparse == 2 * channels * (n * n / 2 - unmasked) - choosing
    assert calculate_train_flops([n], sizes(**SPARSE | INDEXER)) == 3 * sparse - 2 * choosing, "it is not trained"
    assert calculate_train_flops([n], sizes(**SPARSE)) == 3 * dense


def test_a_sequence_that_fits_needs_no_choice():
    short = [calculate_fwd_flops([16], sizes(**SPARSE | more)) for more in ({}, INDEXER)]
    assert short[0] == short[1]


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
