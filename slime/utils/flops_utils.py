"""Forward FLOPs of a dense decoder from its sizes: what balances data-parallel ranks and what TFLOP/s are made of.

It counts matrix products only (no norms, no softmax) and knows nothing about devices or parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def calculate_fwd_flops(seqlens: Iterable[int], args: Any) -> float:
    """FLOPs of one forward pass over sequences of these lengths (a backward pass costs about twice as much).

    Args:
        seqlens: tokens of each sequence; attention is causal and does not cross sequences.
        args: Megatron's size attributes (`num_layers`, `hidden_size`, `num_attention_heads`, `num_query_groups`,
            `kv_channels`,
            `ffn_hidden_size`, `swiglu`, `padded_vocab_size`).
    """
    lengths = list(seqlens)
    query_width = args.num_attention_heads * args.kv_channels
    key_width = (args.num_query_groups or args.num_attention_heads) * args.kv_channels
    attention_weights = args.hidden_size * (2 * query_width + 2 * key_width)  # q and output projection, k and v
    mlp_weights = args.hidden_size * args.ffn_hidden_size * (3 if args.swiglu else 2)
    weights = args.num_layers * (attention_weights + mlp_weights) + args.hidden_size * args.padded_vocab_size
    # scores and weighted values are two products of 2 * n * n * width each, and the causal mask drops half of both
    pairs = sum(length * length for length in lengths)
    return float(2 * weights * sum(lengths) + args.num_layers * 2 * query_width * pairs)
