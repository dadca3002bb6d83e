"""Bytes that a forward and backward pass keep and work with, per micro-batch, on one trainer rank.

Counted are the tensors that autograd saves in the modules that we run (Megatron's local spec, our RMSNorm, packed
rotary embedding and varlen attention), each storage once. H hidden, Q query heads x head size, K key/value heads x
head size, F MLP width, d rotated channels of a head; per token and layer, in elements of the compute dtype:

    two norms          CPU (composite): input, input/rms, output = 6 H; CUDA (one kernel): input, output = 4 H
    norms after        one that adds to the residual keeps its input (and on CPU input/rms), not its output
    fused projection   Q + 2 K: values, and keys before their norm, are views of it
    norms of q and k   CPU: q copied 2 Q, k normalised K; CUDA: q copied Q
    rotary embedding   rotated q and k: Q + K; cos and sin of every token, 2 d, once for all layers
    attention          its output Q; CPU, sequences of different lengths: per length, joined and in order = 3 Q;
                       CUDA: a contiguous copy of the values K; over CP ranks, in place of this rank's keys and values
                       those that its chunks see, 2 K for (2 CP + 1) / 2 times its tokens
    MLP                2 F into the gate, product F; where it is not one kernel (CPU, --no-bias-swiglu-fusion) also
                       silu F and linear half + offset F

Everything with heads or F is divided by TP; H is too under sequence parallelism. Per token also the float32 statistics
of norms and softmax. Experts keep topk rows of a token, balanced routing: H into them and the MLP's widths, where it
is not one kernel also the product times the router's probability. Latent attention follows the same rules with its
own widths; it is not measured on CUDA. Full recomputation keeps the input of every chunk of layers
and makes one chunk again at a time.

The output layer counts apart (`HeadBytes`): T packed tokens, R response tokens, C of them in a chunk
(--log-probs-chunk-size), V columns of the vocabulary of this rank. Logits and their gradient have the compute dtype;
the float32 copies of a chunk's rows exist on CPU alone, where nothing is fused. The formulas name tensors of
slime.algorithms.log_probs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slime.plan.layout import ParallelLayout
from slime.utils.misc import needed
from slime.utils.model_shape import ModelShape

FP32 = 4
DEFERRED_CHUNK = 1024  # Rows of a chunk of --recompute-loss-function where --log-probs-chunk-size does not say


@dataclass(frozen=True)
class Recompute:
    """--recompute-granularity and what goes with it."""

    granularity: str | None = None  # None, "selective" or "full"
    method: str | None = None  # "uniform" (chunks of num_layers) or "block" (the first num_layers layers)
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


@dataclass(frozen=True)
class Compute:
    """How a pass computes: what it runs on decides which tensors its kernels keep."""

    is_cpu: bool
    element_size: int  # Bytes of a parameter, an activation and its gradient
    has_fused_gate: bool = False  # Whether a gated activation is one kernel, which keeps its input alone
    is_plain: bool = False  # transformers' layers with our kernels: projections apart, rotations that keep nothing


@dataclass(frozen=True)
class HeadRows:
    """Rows of logits that the loss of one micro-batch works on."""

    tokens: int  # T, all of the micro-batch
    responses: int  # R, those that predict response tokens
    chunk_size: int  # --log-probs-chunk-size; -1 = all at once
    trains_entropy: bool

    def copies_back(self, compute: Compute) -> int:
        """float32 copies of a chunk in the backward pass: the softmax, for the entropy's gradient also its log."""
        return (1 + self.trains_entropy) * compute.is_cpu


@dataclass(frozen=True)
class HeadBytes:
    """Of the output layer and the loss of one micro-batch."""

    forward: int  # logits [T, V] + on CPU a scaled copy of a chunk of rows and its exponential [C, V]
    backward: int  # The largest moment of the way back to the last layer


def layer_saved(
    shape: ModelShape, layer: int, layout: ParallelLayout, compute: Compute, skipped: Collection[str] = ()
) -> int:
    """Bytes per packed token that a decoder layer keeps for its backward pass.

    Args:
        shape: the model.
        layer: which one (dense or with experts).
        layout: of the trainer.
        compute: what the pass runs on.
        skipped: modules that selective recomputation makes again.
    """
    hidden = shape.hidden_size / (layout.tp if layout.is_sequence_parallel else 1)
    copies = 3 if compute.is_cpu else 2
    norms = 2 * (copies - ("layernorm" in skipped)) * hidden + (shape.num_norms - 2) * (copies - 1) * hidden
    mixing = _delta_net_elements if shape.is_linear(layer) else _attention_elements
    elements = norms + mixing(shape, layout, compute, skipped)
    has_experts = shape.moe_layers[layer] and shape.experts is not None
    of_mlp = _expert_elements if has_experts else _mlp_elements
    elements += of_mlp(shape, layout, compute, skipped)
    heads = shape.num_attention_heads / layout.tp
    statistics = shape.num_norms + heads * ("core_attn" not in skipped) + 2 * heads * shape.has_qk_norm
    if has_experts and shape.experts:
        # the router's probabilities of all and of the chosen experts, and which they are, a byte each
        statistics += 1.25 * shape.experts.num + shape.experts.topk
    return round(elements * compute.element_size + statistics * FP32)


def rotary_saved(shape: ModelShape, compute: Compute) -> int:
    """Bytes per packed token of the angles' cosines and sines, which all layers of a stage share."""
    return 0 if shape.latent is not None else 2 * shape.rotary_channels * compute.element_size


def final_norm_saved(shape: ModelShape, layout: ParallelLayout, compute: Compute) -> int:
    """Bytes per packed token that the norm before the output layer keeps, its output included."""
    hidden = shape.hidden_size / (layout.tp if layout.is_sequence_parallel else 1)
    return round((3 if compute.is_cpu else 2) * hidden * compute.element_size) + FP32


def sent_saved(shape: ModelShape, layout: ParallelLayout, compute: Compute, num_chunks: int) -> int:
    """Per packed token: what that many chunks of a stage sent on, kept where messages overlap with the work."""
    hidden = shape.hidden_size / (layout.tp if layout.is_sequence_parallel else 1)
    return round(num_chunks * hidden * compute.element_size)


def _attention_elements(
    shape: ModelShape, layout: ParallelLayout, compute: Compute, skipped: Collection[str]
) -> float:
    tp = layout.tp
    q, k, v, out = (
        width / tp for width in (shape.query_width, shape.key_width, shape.value_width, shape.attention_out_width)
    )
    output = 3 * out if compute.is_cpu and "core_attn" not in skipped else out
    gathers = layout.cp > 1 and "core_attn" not in skipped
    seen = layout.cp + 0.5 if gathers else 1  # two chunks see 2 CP + 1 together
    if shape.latent is not None:
        latent = shape.latent
        low_rank = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        up = 0 if "mla_up_proj" in skipped else q + (k + v)
        return low_rank + up + q + seen * (k + v) + output
    norms = ((2 * q + k) if compute.is_cpu else q) if shape.has_qk_norm else 0
    gate = 2 * q if shape.has_output_gate else 0  # the gate and its sigmoid
    if gathers:
        projection = q + k + v if shape.has_qk_norm else 0
        return projection + norms + q + seen * (k + v) + output + gate
    if compute.is_plain:
        return (q + k if shape.has_qk_norm else 0) + q + k + v + output + gate
    values = 0 if compute.is_cpu or not shape.has_qk_norm else v  # a copy beside the projection that the norm keeps
    return (q + k + v) + norms + q + k + values + output + gate


def _delta_net_elements(
    shape: ModelShape, layout: ParallelLayout, compute: Compute, skipped: Collection[str]
) -> float:
    """The projection; the convolution's output; keys and queries normed and spread over value heads; the output,
    normed and gated. What the rule keeps of its chunks is not counted.

    A context-parallel rank goes through whole sequences between the projection and the norm.
    """
    net = needed(shape.delta_net)
    spread = 2 * net.num_value_heads * net.key_head_dim + net.value_width
    whole = layout.cp * (2 * net.conv_width + spread + net.value_width + net.conv_width * (layout.cp > 1))
    return (net.in_width + whole + 2 * net.value_width) / layout.tp


def _mlp_elements(shape: ModelShape, layout: ParallelLayout, compute: Compute, skipped: Collection[str]) -> float:
    return 0 if "mlp" in skipped else _mlp_widths(shape, compute) * shape.ffn_hidden_size / layout.tp


def _mlp_widths(shape: ModelShape, compute: Compute) -> int:
    """MLP widths that are kept: with a gate two before it and three behind, one if it is a kernel; else one on each
    side."""
    return (3 if compute.has_fused_gate else 5) if shape.is_gated else 2


def _expert_elements(shape: ModelShape, layout: ParallelLayout, compute: Compute, skipped: Collection[str]) -> float:
    moe = needed(shape.experts)
    hidden = shape.hidden_size / (layout.tp if layout.is_sequence_parallel else 1)
    if "moe" in skipped:
        return 0
    widths = _mlp_widths(shape, compute) + (not compute.has_fused_gate)  # the product times the router's probability
    if shape.is_gated and "moe_act" in skipped:
        widths = 2
    routed = moe.topk * (hidden + widths * moe.ffn_hidden_size / layout.etp)
    of_shared = 0 if "shared_experts" in skipped else _mlp_widths(shape, compute)
    return routed + of_shared * moe.shared_ffn_hidden_size / layout.tp


def layer_working(shape: ModelShape, layer: int, layout: ParallelLayout, compute: Compute, tokens: int) -> int:
    """Bytes that one layer's backward pass needs beside what was kept: gradients on the way, one weight's gradient.

    The largest moment is the product of the gate: gradients of the layer's output (H) and of both factors (2 F); the
    gradient of the largest matrix is a tensor of its own before it is added to the gradient buffer.
    """
    is_expert = shape.moe_layers[layer] and shape.experts is not None
    if is_expert and shape.experts:
        width, rows = shape.experts.ffn_hidden_size / layout.etp, shape.experts.topk
    else:
        width, rows = shape.ffn_hidden_size / layout.tp, 1
    gradients = tokens * (shape.hidden_size + 2 * width * rows)
    matrix = (1 + shape.is_gated) * width * shape.hidden_size
    return round((gradients + matrix) * compute.element_size)


def layer_forward(shape: ModelShape, layer: int, layout: ParallelLayout, compute: Compute, tokens: int) -> int:
    """Bytes that one layer needs in a pass that keeps nothing: its input, its normalised input and the MLP."""
    is_expert = shape.moe_layers[layer] and shape.experts is not None
    if is_expert and shape.experts:
        widths = shape.experts.topk * (_mlp_widths(shape, compute) * shape.experts.ffn_hidden_size / layout.etp)
        widths += 2 * shape.experts.topk * shape.hidden_size
    else:
        widths = _mlp_widths(shape, compute) * shape.ffn_hidden_size / layout.tp
    return round(tokens * (2 * shape.hidden_size + widths) * compute.element_size)


def stage_saved(
    shape: ModelShape, layers: Collection[int], layout: ParallelLayout, compute: Compute, recompute: Recompute
) -> tuple[int, int]:
    """Bytes per packed token of one pipeline stage: (kept over the whole micro-batch, made again for one chunk)."""
    hidden = shape.hidden_size * compute.element_size / (layout.tp if layout.is_sequence_parallel else 1)
    angles = rotary_saved(shape, compute)
    if recompute.granularity != "full":
        skipped = recompute.modules if recompute.granularity == "selective" else ()
        again = max((layer_saved(shape, n, layout, compute) for n in layers), default=0) if skipped else 0
        kept = [layer_saved(shape, n, layout, compute, skipped) for n in layers]
        return angles + sum(kept), max(0, again - min(kept, default=0))
    saved = [layer_saved(shape, layer, layout, compute) for layer in layers]
    size = max(1, recompute.num_layers)
    if recompute.method == "block":
        return angles + round(hidden * len(saved[:size])) + sum(saved[size:]), max(saved[:size], default=0)
    chunks = [sum(saved[start : start + size]) for start in range(0, len(saved), size)]
    counted = round(hidden) if compute.is_plain else 0  # a chunk's input, which its first norm keeps, too
    return angles + round(hidden * len(chunks)), max(chunks, default=counted) - counted


def deferred_head_bytes(shape: ModelShape, layout: ParallelLayout, compute: Compute, rows: HeadRows) -> HeadBytes:
    """The same with --recompute-loss-function: logits of one chunk of rows at a time, made again on the way back.

    Forward: the chunk's logits, on CPU a scaled copy and its exponential. Backward: logits and their gradient beside
    the fp32 copies of the loss, or the output matrix's gradient of all chunks so far, of this one, and their sum.
    """
    columns = shape.vocab_size / layout.tp
    chunk = min(rows.chunk_size if rows.chunk_size > 0 else DEFERRED_CHUNK, rows.responses)
    logits, copy = chunk * columns * compute.element_size, chunk * columns * FP32
    matrix = columns * shape.hidden_size * compute.element_size
    selected = 2 * rows.responses * shape.hidden_size * compute.element_size  # hidden states and their gradient
    return HeadBytes(
        forward=round(selected + logits + 2 * copy * compute.is_cpu),
        backward=round(selected + max(2 * logits + rows.copies_back(compute) * copy, logits + 3 * matrix)),
    )


def head_bytes(shape: ModelShape, layout: ParallelLayout, compute: Compute, rows: HeadRows) -> HeadBytes:
    """Of the output layer and the log-probs of one micro-batch.

    Backward, in the order of events: the loss (logits and their gradient, and of a chunk the softmax, which becomes
    the rows' gradient, with an entropy bonus the log softmax too); the gradient of the output matrix [V, H] beside
    that of the logits.
    """
    columns = shape.vocab_size / layout.tp
    chunk = min(rows.chunk_size, rows.responses) if rows.chunk_size > 0 else rows.responses
    logits, copy = rows.tokens * columns * compute.element_size, chunk * columns * FP32
    matrix = shape.hidden_size * columns * compute.element_size
    return HeadBytes(
        forward=round(logits + 2 * copy * compute.is_cpu),
        backward=round(logits + max(logits + rows.copies_back(compute) * copy, matrix)),
    )
