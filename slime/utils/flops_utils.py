"""FLOPs of a decoder from its sizes: what balances data-parallel ranks, and what TFLOP/s are made of.

A forward pass over sequences of lengths n_1, n_2, ... costs

    2 x (weights of the matrices that one token goes through) x (sum of n_i)
    + layers x (channels of all query heads + channels of all value heads) x (sum of n_i^2)

The second line is attention: scores and weighted values are two products of 2 x n^2 x channels each, of which the
causal mask drops half. With experts a token goes through the router, `topk` experts and the shared one, not through
all. With latent attention (arXiv:2405.04434) the matrices are the low-rank ones, and keys are as wide as queries. A
backward pass costs twice as much: gradients of inputs and of weights. Under LoRA adapters, which are not counted,
weights get none.

A layer with a gated delta net (arXiv:2412.06464, equation 10) has no second line. For each token and value head the
state [key channels, value channels] is read with the key, updated with an outer product and read with the query, 2 x
key channels x value channels each; and there is the convolution, `kernel` products for each channel of queries, keys
and values. What implementations that go by chunks do beyond that is not counted.

In sparse attention (DeepSeek-V3.2, arXiv:2512.02556, equations 1 and 2) a token attends to k keys at most: n^2 is
then 2 n k - k^2 where n > k. There, and only there, the indexer runs: its projections, and for each pair of tokens a
product for each of its heads and their weighted sum. It is not trained: training has no backward pass of it.

Not counted: embedding look-up, norms, softmax, rotation, biases, and what recomputation does a second time. Layers
that predict further tokens run in training alone and are counted by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from slime.utils.misc import needed
from slime.utils.model_shape import ModelShape

if TYPE_CHECKING:
    from slime.config.args import Args


PEAK_TFLOPS = {
    "A100": 312.0, "A800": 312.0, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "H200": 989.0, "GH200": 989.0,
    "H20": 148.0, "B200": 2250.0, "GB200": 2500.0, "B300": 2250.0, "GB300": 2500.0, "L4": 121.0, "L40S": 362.0,
    "A10": 125.0, "A10G": 70.0, "MI250X": 191.5, "MI300X": 1307.0, "MI325X": 1307.0, "MI355X": 2500.0,
}  # fmt: skip
"""Dense bf16 products of one device, by its name, from the makers' data sheets."""


def peak_tflops(device: str) -> float | None:
    """TFLOP/s of dense bf16 products at most, by the name that a driver gives a device; None for an unknown one.

    Example:
        >>> peak_tflops("NVIDIA H100 PCIe"), peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("a device")
        (756.0, 989.0, None)
    """
    words = set(device.replace("-", " ").split())
    return next((peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split())), None)


def calculate_fwd_flops(seqlens: Iterable[int], args: Args) -> float:
    """FLOPs of one forward pass over sequences of these lengths.

    Args:
        seqlens: tokens of each sequence; attention is causal and does not cross sequences.
        args: Megatron's size attributes (`slime.utils.model_shape.MODEL_DEFAULTS` has their names).

    Raises:
        ValueError: the sizes do not describe a model.
    """
    return forward_flops(_shape_of(args), seqlens)


def calculate_train_flops(seqlens: Iterable[int], args: Args) -> float:
    """FLOPs of forward and backward passes over sequences of these lengths, prediction layers left out.

    Args:
        seqlens: as `calculate_fwd_flops`.
        args: Megatron's size attributes, and `lora_rank`: the weights under adapters get no gradients.

    Raises:
        ValueError: the sizes do not describe a model.
    """
    shape, lengths = _shape_of(args), list(seqlens)
    frozen = _coefficients(shape)[0] * sum(lengths) if vars(args).get("lora_rank") else 0.0
    return 3 * forward_flops(shape, lengths) - 2 * sum(map(_indexer_flops(shape), lengths)) - frozen


def forward_flops(shape: ModelShape, seqlens: Iterable[float]) -> float:
    """As `calculate_fwd_flops`, of a shape."""
    per_token, per_pair = _coefficients(shape)
    topk = shape.indexer.topk if shape.indexer else None
    lengths = list(seqlens)
    pairs = sum(_pairs(length, topk) for length in lengths)
    return float(per_token * sum(lengths) + per_pair * pairs + sum(map(_indexer_flops(shape), lengths)))


def _shape_of(args: Args) -> ModelShape:
    shape = ModelShape.of(args)
    if shape is None:
        raise ValueError("FLOPs cannot be counted: the model's number of layers, heads, channels or words is not set")
    return shape


def _pairs(length: float, topk: int | None) -> float:
    """Twice the pairs of a token and a key that it attends to."""
    if topk is None or length <= topk:
        return length * length
    return 2 * length * topk - topk * topk


def _indexer_flops(shape: ModelShape) -> Callable[[float], float]:
    """FLOPs of the indexers of all layers over a sequence, by its length."""
    indexer, latent = shape.indexer, shape.latent
    if indexer is None or latent is None:
        return lambda length: 0
    heads, head, hidden = indexer.num_heads, indexer.head_dim, shape.hidden_size
    per_token = 2 * ((latent.q_lora_rank or 0) * heads * head + hidden * (head + heads))
    per_pair = heads * head + heads

    def flops(length: float) -> float:
        return shape.num_layers * (per_token * length + per_pair * length**2) if length > indexer.topk else 0

    return flops


def calculate_prediction_flops(seqlens: Iterable[int], num_predicted: int, args: Args) -> float:
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
    dense = _mlp(shape, shape.ffn_hidden_size)
    sparse = _active_expert_weights(shape) if shape.experts is not None else 0
    weights = sum(sparse if has_experts else dense for has_experts in shape.moe_layers)
    attending = shape.num_attention_layers
    weights += attending * _attention_weights(shape) + shape.embedding_params
    per_token = 2 * weights + (shape.num_layers - attending) * _delta_net_flops(shape)
    return per_token, attending * (shape.query_width + shape.attention_out_width)


def _delta_net_flops(shape: ModelShape) -> int:
    """Of a layer with a gated delta net, per token."""
    net = shape.delta_net
    if net is None:
        return 0
    projections = 2 * shape.hidden_size * (net.in_width + net.value_width)
    state = 3 * 2 * net.num_value_heads * net.key_head_dim * net.value_head_dim
    return projections + 2 * net.kernel * net.conv_width + state


def _attention_weights(shape: ModelShape) -> int:
    """Of the projections of a layer's attention."""
    hidden, out = shape.hidden_size, shape.attention_out_width * shape.hidden_size
    latent = shape.latent
    if latent is None:
        query = (1 + shape.has_output_gate) * shape.query_width
        return hidden * (query + shape.key_width + shape.value_width) + out
    rank = latent.q_lora_rank
    query = hidden * shape.query_width if rank is None else rank * (hidden + shape.query_width)
    down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * shape.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return query + down + up + out


def _active_expert_weights(shape: ModelShape) -> int:
    """Of a layer with experts, those that one token goes through."""
    experts = needed(shape.experts)
    router = shape.hidden_size * (experts.num + experts.has_shared_gate)
    chosen = experts.topk * _mlp(shape, experts.ffn_hidden_size)
    return router + chosen + _mlp(shape, experts.shared_ffn_hidden_size)


def _mlp(shape: ModelShape, width: int) -> int:
    return (3 if shape.is_gated else 2) * shape.hidden_size * width
