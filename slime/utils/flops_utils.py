"""FLOPs of a decoder from its sizes: what balances data-parallel ranks, and what TFLOP/s are made of.

A forward pass over sequences of lengths n_1, n_2, ... costs

    2 x (weights of the matrices that one token goes through) x (sum of n_i)
    + layers x (channels of all query heads + channels of all value heads) x (sum of n_i^2)

The second line is attention: scores and weighted values are two products of 2 x n^2 x channels each, of which the
causal mask drops half. With experts a token goes through the router, `topk` experts and the shared one, not through
all. With latent attention (arXiv:2405.04434) the matrices are the low-rank ones, and keys are as wide as queries. A
backward pass costs twice as much: gradients of inputs and of weights. Not counted: embedding look-up, norms, softmax,
rotation, biases, and what recomputation does a second time. Layers that predict further tokens run in training alone
and are counted by themselves. It knows nothing about devices or parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from slime.utils.plan.shape import ModelShape


def calculate_fwd_flops(seqlens: Iterable[int], args: Any) -> float:
    """FLOPs of one forward pass over sequences of these lengths; a step of training costs three times as much.

    Args:
        seqlens: tokens of each sequence; attention is causal and does not cross sequences.
        args: Megatron's size attributes (`slime.utils.plan.shape.MODEL_DEFAULTS` has their names).

    Raises:
        ValueError: the sizes do not describe a model.
    """
    shape = ModelShape.of(args)
    if shape is None:
        raise ValueError("FLOPs cannot be counted: the model's number of layers, heads, channels or words is not set")
    per_token, per_pair = _coefficients(shape)
    lengths = list(seqlens)
    return float(per_token * sum(lengths) + per_pair * sum(length * length for length in lengths))


def calculate_prediction_flops(seqlens: Iterable[int], num_predicted: int, args: Any) -> float:
    """FLOPs of training the layers that predict further tokens (--enable-mtp-training), forward and backward.

    Each layer is one like the model's last and a projection from two hidden states to one, 3 x the forward pass over
    all tokens; and the output layer over the tokens that are predicted, 2 x: its weights get no gradient from here.

    Args:
        seqlens: as `calculate_fwd_flops`.
        num_predicted: response tokens.
        args: Megatron's size attributes.
    """
    shape = ModelShape.of(args)
    if shape is None or not shape.num_mtp_layers:
        return 0.0
    has_experts, lengths = shape.moe_layers[-1], list(seqlens)
    mlp = _active_expert_weights(shape) if has_experts else _mlp(shape, shape.ffn_hidden_size)
    weights = _attention_weights(shape) + mlp + 2 * shape.hidden_size**2
    pairs = (shape.query_width + shape.attention_out_width) * sum(length * length for length in lengths)
    head = 2 * shape.embedding_params * num_predicted
    return float(shape.num_mtp_layers * (3 * (2 * weights * sum(lengths) + pairs) + 2 * head))


@lru_cache(maxsize=8)
def _coefficients(shape: ModelShape) -> tuple[int, int]:
    """FLOPs per token, and per pair of tokens of one sequence."""
    dense, sparse = _attention_weights(shape) + _mlp(shape, shape.ffn_hidden_size), 0
    if shape.experts is not None:
        sparse = _attention_weights(shape) + _active_expert_weights(shape)
    weights = sum(sparse if has_experts else dense for has_experts in shape.moe_layers)
    per_pair = shape.num_layers * (shape.query_width + shape.attention_out_width)
    return 2 * (weights + shape.embedding_params), per_pair


def _attention_weights(shape: ModelShape) -> int:
    """Of the projections of a layer's attention."""
    hidden, out = shape.hidden_size, shape.attention_out_width * shape.hidden_size
    latent = shape.latent
    if latent is None:
        return hidden * (shape.query_width + shape.key_width + shape.value_width) + out
    rank = latent.q_lora_rank
    query = hidden * shape.query_width if rank is None else rank * (hidden + shape.query_width)
    down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * shape.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return query + down + up + out


def _active_expert_weights(shape: ModelShape) -> int:
    """Of a layer with experts, those that one token goes through."""
    experts = shape.experts
    assert experts is not None
    router = shape.hidden_size * (experts.num + experts.has_shared_gate)
    chosen = experts.topk * _mlp(shape, experts.ffn_hidden_size)
    return router + chosen + _mlp(shape, experts.shared_ffn_hidden_size)


def _mlp(shape: ModelShape, width: int) -> int:
    return (3 if shape.is_gated else 2) * shape.hidden_size * width
