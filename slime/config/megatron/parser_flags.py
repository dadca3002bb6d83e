"""Megatron options that Megatron-LM's argument parser has and no config dataclass describes: the model's.

Also fields of the dataclasses that need a form of their own on a command line. The options of training (precision,
optimizer, checkpoints, logs) are in parser_flags_training.py. Declarations only: which of them has an effect is said
in megatron_flags.py.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

from slime.config.megatron.config_flags import FlagAdder, Row
from slime.config.megatron.parser_flags_training import TRAINING_GROUPS

LONGEST_PATTERN = 4096
"""Most entries of a list of layers; more is a slip of the pen."""


def layer_pattern(text: str) -> int | list[int]:
    """Read "4" (every 4th layer) or a list of one 0 or 1 per layer, as a Python expression: "([0]*3+[1]*58)".

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        value = _pattern_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, int | list) or value == [] or (isinstance(value, int) and value < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no layer pattern such as 4, [1,0,1,0] or '([0]*3+[1]*58)'")
    return value


def _pattern_value(node: ast.expr) -> Any:
    """An int, or a list of ints, from literals, + and *; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LONGEST_PATTERN:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        items = [_pattern_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return items
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _pattern_value(node.left), _pattern_value(node.right)
        lists = [isinstance(side, list) for side in (left, right)]
        if isinstance(node.op, ast.Add) and all(lists) and len(left) + len(right) <= LONGEST_PATTERN:
            return left + right
        if isinstance(node.op, ast.Mult) and sum(lists) == 1:
            items, times = (left, right) if lists[0] else (right, left)
            if len(items) * times <= LONGEST_PATTERN:
                return items * times
    raise ValueError("no layer pattern")


def int_pair(text: str) -> tuple[int, int]:
    """Read "(128, 0)" or "128,0".

    Raises:
        argparse.ArgumentTypeError: it is no pair of integers.
    """
    try:
        left, right = text.strip().strip("()").split(",")
        return int(left), int(right)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of integers such as 128,0") from error


BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")

MODEL: tuple[Row, ...] = (
    Row("--swiglu", "gated linear unit with SiLU in the MLP"),
    Row("--squared-relu", "squared ReLU in the MLP"),
    Row("--quick-geglu", "gated quick GELU in the MLP"),
    Row("--openai-gelu", "OpenAI's GELU in the MLP"),
    Row("--onnx-safe", "workarounds for ONNX export"),
    Row(
        "--untie-embeddings-and-output-weights",
        "the output layer has weights of its own instead of sharing the embedding's",
    ),
    Row("--group-query-attention", "use --num-query-groups key and value heads"),
    Row("--vocab-size", "vocabulary before padding (default: the HF config's)", int),
    Row("--make-vocab-size-divisible-by", "pad the vocabulary to a multiple of this x TP", int, 128),
    Row("--padded-vocab-size", "rows of the embedding (default: padded --vocab-size)", int),
    Row("--vocab-extra-ids", "further tokens of the vocabulary", int, 0),
    Row("--seq-length", "longest sequence that Megatron is told about (default 4096)", int),
    Row("--encoder-seq-length", "the same as --seq-length", int),
    Row("--max-position-embeddings", "positions of the model (default: --seq-length)", int),
    Row(
        "--position-embedding-type",
        "how positions enter the model (default: rope; upstream's: learned_absolute)",
        str,
        "rope",
        choices=("rope", "mrope", "learned_absolute", "relative", "none"),
    ),
    Row("--no-position-embedding", "no learned positions", default=True, dest="add_position_embedding"),
    Row(
        "--use-rotary-position-embeddings",
        "the same as --position-embedding-type rope",
        default="rope",
        dest="position_embedding_type",
        const="rope",
    ),
    Row("--rotary-base", "base of the rotary frequencies", float, 10000),
    Row("--rotary-percent", "share of each head's channels that is rotated", float, 1.0),
    Row("--rotary-seq-len-interpolation-factor", "linear interpolation of positions", int),
    Row("--use-rope-scaling", "scale the rotary frequencies as Llama 3.1 does"),
    Row("--rope-scaling-factor", "with --use-rope-scaling: the factor", float, 8.0),
    Row("--rope-scaling-low-freq-factor", "with --use-rope-scaling: low_freq_factor", float, 1.0),
    Row("--rope-scaling-high-freq-factor", "with --use-rope-scaling: high_freq_factor", float, 4.0),
    Row(
        "--rope-scaling-original-max-position-embeddings",
        "with --use-rope-scaling: original_max_position_embeddings",
        int,
        8192,
    ),
    Row(
        "--rope-type",
        "rotary embedding of --multi-latent-attention (default: yarn there, else rope)",
        str,
        choices=("rope", "yarn"),
    ),
    Row("--no-rope-freq", "layers without rotary embedding: every Nth, or a list", layer_pattern),
    Row("--window-size", "sliding window: tokens to the left and right", int_pair),
    Row("--window-attn-skip-freq", "layers with full attention among those with a window", layer_pattern),
    Row("--linear-attention-freq", "layers with linear attention: every Nth is full, or a list", layer_pattern),
    Row("--linear-attention-type", "kind of linear attention", str, choices=("gated_delta_net",)),
    Row("--post-self-attn-layernorm", "norm after attention, before the residual (GLM-4)"),
    Row("--post-mlp-layernorm", "norm after the MLP, before the residual (GLM-4)"),
    Row("--spec", "module and function of a layer specification", str, nargs="*"),
    Row("--enable-experimental", "allow megatron-core's experimental features"),
    Row("--hybrid-attention-ratio", "share of attention layers in a hybrid model", float, 0.0),
    Row("--hybrid-mlp-ratio", "share of MLP layers in a hybrid model", float, 0.0),
    Row("--hybrid-override-pattern", "layers of a hybrid model, one letter each", str),
    Row("--heterogeneous-layers-config-path", "file that describes each layer", str),
    Row("--heterogeneous-layers-config-encoded-json", "JSON that describes each layer", str),
    Row("--init-method-xavier-uniform", "Xavier's initialisation"),
    Row("--te-precision-config-file", "precision of each module", str),
    Row("--cuda-graph-scope", "what CUDA graphs hold", str, "full", nargs="+"),
    Row("--no-bias-swiglu-fusion", "no fused kernel for bias and SwiGLU", default=True, dest="bias_swiglu_fusion"),
    Row("--no-bias-gelu-fusion", "no fused kernel for bias and GELU", default=True, dest="bias_gelu_fusion"),
)

EXPERTS: tuple[Row, ...] = (
    Row("--moe-layer-freq", "layers with experts: every Nth, or a list such as '([0]*3+[1]*58)'", layer_pattern, 1),
    Row(
        "--moe-router-load-balancing-type",
        "how the router's load is balanced",
        str,
        "aux_loss",
        choices=BALANCING,
        nargs="+",
    ),
    Row("--moe-aux-loss-coeff", "weight of the load-balancing loss", float, 0.0, nargs="+"),
    Row("--moe-use-upcycling", "make the experts from a dense checkpoint"),
    Row("--moe-upcycling-granularity", "experts per MLP that is split up", int, 1),
)

PARALLEL: tuple[Row, ...] = (
    Row("--num-layers-per-virtual-pipeline-stage", "layers of one virtual pipeline stage", int),
    Row("--num-virtual-stages-per-pipeline-rank", "virtual pipeline stages per rank", int),
    Row("--pipeline-model-parallel-layout", "layers of each pipeline stage, as in 'Et*3|(tt|)*29,m|L'", str),
    Row("--pipeline-model-parallel-split-rank", "rank at which an encoder ends", int),
    Row("--encoder-tensor-model-parallel-size", "tensor parallel size of an encoder", int, 0),
    Row("--encoder-pipeline-model-parallel-size", "pipeline parallel size of an encoder", int, 0),
    Row("--encoder-num-layers", "layers of an encoder", int),
    Row("--decoder-num-layers", "layers of a decoder", int),
    Row(
        "--cp-comm-type",
        "how context-parallel ranks exchange keys and values",
        str,
        "p2p",
        choices=("p2p", "a2a", "allgather", "a2a+p2p"),
        nargs="+",
    ),
    Row("--no-scatter-gather-tensors-in-pipeline", "send whole tensors", default=True, dest="scatter_gather_tensors"),
    Row("--no-align-param-gather", "stages gather parameters when they need them", dest="no_align_param_gather"),
    Row("--no-align-grad-reduce", "stages reduce gradients when they have them", dest="no_align_grad_reduce"),
    Row("--use-tp-pp-dp-mapping", "order of the ranks: TP, PP, DP"),
    Row("--tp-comm-overlap-cfg", "file with settings of --tp-comm-overlap", str),
    Row("--use-sharp", "reduce gradients in the switches of the network; needs NVIDIA's SHARP library"),
    Row("--sharp-enabled-group", "which group does (default: dp)", str, choices=("dp", "dp_replica")),
    Row("--nccl-communicator-config-path", "YAML file with settings of NCCL for Megatron's groups", str),
    Row("--high-priority-stream-groups", "groups whose streams go first", str, nargs="*"),
    Row("--disable-gloo-process-groups", "no groups on the CPU", default=True, dest="enable_gloo_process_groups"),
    Row("--use-torch-fsdp2", "torch's fully sharded data parallel"),
    Row("--torch-fsdp2-no-reshard-after-forward", "keep gathered weights", dest="torch_fsdp2_no_reshard"),
    Row("--enable-full-sharding-in-hsdp", "shard over all replicas"),
    Row("--ddp-num-buckets", "buckets of the gradients, of as many parameters each as that takes", int),
    Row("--local-rank", "set by launchers", int),
    Row("--lazy-mpu-init", "initialise parallel state later"),
)


def add_parser_flags(parser: argparse.ArgumentParser) -> None:
    """Add every option of this module and of parser_flags_training.py, except those that the parser has."""
    groups = {"model": MODEL, "experts": EXPERTS, "parallel layout": PARALLEL, **TRAINING_GROUPS}
    for title, rows in groups.items():
        flags = FlagAdder(parser, f"megatron: {title}")
        for row in rows:
            row.add_to(flags)
