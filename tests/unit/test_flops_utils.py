"""FLOPs counted by hand for one tiny layer."""

from __future__ import annotations

from types import SimpleNamespace

from slime.utils.flops_utils import calculate_fwd_flops


def sizes(**changes):
    values = {
        "num_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 2,
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


def test_attention_does_not_cross_sequences():
    assert calculate_fwd_flops([10, 10], sizes()) == 2 * calculate_fwd_flops([10], sizes())
    assert calculate_fwd_flops([20], sizes()) > calculate_fwd_flops([10, 10], sizes())


def test_layers_and_ungated_mlp_are_counted():
    per_layer = calculate_fwd_flops([8], sizes(num_layers=2)) - calculate_fwd_flops([8], sizes())
    ungated = calculate_fwd_flops([8], sizes(num_layers=2, swiglu=False)) - calculate_fwd_flops(
        [8], sizes(swiglu=False)
    )
    assert per_layer - ungated == 2 * 8 * 4 * 5
