"""What contradicts what among the flags of attention that is not Megatron's own: gated, linear, sparse.

It reads flags and returns sentences; the sizes of the model are given. The rest of the parallel layout is
layout_checks.py's.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.megatron.flag_classes import option_of
from slime.config.megatron.layout import query_groups
from slime.models.hf_config import indexer_types
from slime.plan.layout import ParallelLayout

_DELTA_NET = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_NORM_OVER_HEADS = ("get_minimax_m2_spec", "get_minimax_m2_layer_spec")
_INDEXER = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")


def check_attention(args: Args) -> Iterator[str]:
    """One sentence for each contradiction."""
    tensor, groups = args.tensor_model_parallel_size, query_groups(args)
    yield from _check_spec(args.spec)
    if args.attention_output_gate and args.multi_latent_attention:
        yield "--attention-output-gate does not go with --multi-latent-attention, which has no such gate; drop one."
    if args.attention_output_gate and tensor > groups:
        yield (
            f"--attention-output-gate with --tensor-model-parallel-size {tensor} and --num-query-groups {groups}: "
            "ranks that share a group would take each other's gates; use at most as many ranks as groups."
        )
    if args.spec and args.spec[-1] in _NORM_OVER_HEADS and tensor > groups:
        yield (
            f"--spec {' '.join(args.spec)} with --tensor-model-parallel-size {tensor} and --num-query-groups "
            f"{groups}: its norm goes over the keys of all heads, and ranks that share a group would count it twice; "
            "use at most as many ranks as groups."
        )
    if args.experimental_attention_variant == "gated_delta_net":
        yield from _check_delta_net(args)
    if args.experimental_attention_variant == "dsa":
        yield from _check_sparse(args)


def _check_spec(spec: list[str] | None) -> Iterator[str]:
    """That there is such a function, as far as the file says it: Megatron is not imported for it."""
    if spec is None:
        return
    if len(spec) != 2:
        yield f"--spec {' '.join(spec)}: give a module and the name of a function in it, as two words."
        return
    module, function = spec
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a package around it
        found = None
    if found is None:
        yield f"--spec {module} {function}: there is no module {module} on the Python path (PYTHONPATH)."
    elif found.origin and found.origin.endswith(".py"):
        text = Path(found.origin).read_text(errors="replace")
        if not re.search(rf"\b{re.escape(function)}\b|import \*|__getattr__", text):
            yield f"--spec {module} {function}: {found.origin} has no {function}."


def _check_delta_net(args: Args) -> Iterator[str]:
    variant, layers = "--experimental-attention-variant gated_delta_net", args.linear_attention_freq
    if layers is None:
        yield f"{variant} needs --linear-attention-freq, which says which layers have it: 4 leaves every 4th full."
    if isinstance(layers, list) and len(layers) != args.num_layers:
        yield f"--linear-attention-freq lists {len(layers)} layers, --num-layers says {args.num_layers}."
    for name in _DELTA_NET:
        if not vars(args)[name] or vars(args)[name] < 1:
            yield f"{variant} needs {option_of(name)} of at least 1, not {vars(args)[name]}."
            return
    if args.linear_num_value_heads % args.linear_num_key_heads:
        yield (
            f"--linear-num-value-heads {args.linear_num_value_heads} does not divide by --linear-num-key-heads "
            f"{args.linear_num_key_heads}; every key head has as many value heads."
        )


def _check_sparse(args: Args) -> Iterator[str]:
    variant = "--experimental-attention-variant dsa"
    if not args.multi_latent_attention or args.q_lora_rank is None:
        yield f"{variant} needs --multi-latent-attention and --q-lora-rank, from whose queries indexers choose keys."
    for name in _INDEXER:
        if not vars(args)[name] or vars(args)[name] < 1:
            yield f"{variant} needs {option_of(name)} of at least 1, not {vars(args)[name]}."
    if args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"]):
        yield (
            f"{variant} does not go with --recompute-granularity selective of core_attn, which does not hand on what "
            "indexers read; give other --recompute-modules, or --recompute-granularity full."
        )


def check_indexer_stages(args: Args, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """A layer that takes the choice of an earlier one's indexer is on that one's pipeline stage.

    Which layers do is said by config.json alone; the layout has to be one.
    """
    if args.experimental_attention_variant != "dsa" or hf_config is None or args.pipeline_model_parallel_size == 1:
        return
    kinds = indexer_types(hf_config, args.num_layers)
    stages = ParallelLayout.of(args, args.num_layers).stage_layers
    firsts = [layer for stage in stages for layer in stage if layer - 1 not in stage]  # of virtual stages, too
    if orphans := [layer for layer in sorted(firsts) if kinds[layer : layer + 1] == ["shared"]]:
        choosing = [layer for layer, kind in enumerate(kinds) if kind == "full"]
        yield (
            f"pipeline stages begin with the layers {', '.join(map(str, orphans))} (from 0), which take the keys that "
            "the indexer of an earlier layer chose (config.json), on another stage; let every stage begin with one of "
            f"{', '.join(map(str, choosing))}, by --pipeline-model-parallel-layout, or use one stage."
        )
