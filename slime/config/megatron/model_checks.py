"""What contradicts what among Megatron's flags of a model: sizes, experts, attention that is not Megatron's own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slime.config.args import Args
from slime.config.megatron.derived import Layout, query_groups
from slime.config.megatron.flag_classes import option_of
from slime.config.problems import NoEffect
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


T = TypeVar("T")


def check_moe(args: Args) -> Iterator[str]:
    """One sentence for each contradiction between the flags of experts."""
    if args.multi_latent_attention and Layout.of(args).tensor > 1 and not args.sequence_parallel:
        yield (
            f"--multi-latent-attention with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
            "--sequence-parallel: without it Megatron counts the gradients of its norms once per rank."
        )
    if args.num_moe_experts:
        yield from _check_choice(args)
        yield from _check_losses(args)


def _check_choice(args: Args) -> Iterator[str]:
    experts, topk = args.num_moe_experts, args.moe_router_topk
    groups, group_topk = args.moe_router_num_groups, args.moe_router_group_topk
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        yield (
            f"--moe-router-enable-expert-bias with --moe-router-score-function {args.moe_router_score_function}: the "
            "bias is added to sigmoid scores; use sigmoid."
        )
    if topk == 1 and args.moe_router_score_function == "softmax" and not args.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1 with softmax scores needs --moe-router-pre-softmax: the softmax over one expert is "
            "always 1."
        )
    if groups and not group_topk:
        yield NoEffect(
            f"--moe-router-num-groups {groups}",
            "without --moe-router-group-topk",
            "give both",
            instead={"moe_router_num_groups": None},
        )
    if experts and groups and group_topk and experts % groups == 0 and group_topk <= groups:
        if topk > group_topk * (experts // groups):
            yield (
                f"--moe-router-topk {topk} is more than the {group_topk * (experts // groups)} experts of "
                f"--moe-router-group-topk {group_topk} of {groups} groups."
            )
        if topk < group_topk:
            yield (
                f"--moe-router-group-topk {group_topk} is more than --moe-router-topk {topk}: a group is ranked by "
                "the sum of its best topk / group-topk experts; use at most as many groups."
            )
    if args.moe_shared_expert_gate and not args.moe_shared_expert_intermediate_size:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size."


def _as_list(value: T | list[T]) -> list[T]:
    return value if isinstance(value, list) else [value]


def _check_losses(args: Args) -> Iterator[str]:
    kinds = _as_list(args.moe_router_load_balancing_type)
    weights = _as_list(args.moe_aux_loss_coeff)
    if "sinkhorn" in kinds:
        yield "--moe-router-load-balancing-type sinkhorn trains other choices than the engine's; use aux_loss."
    elif len(kinds) != len(weights):
        yield (
            f"--moe-router-load-balancing-type names {len(kinds)} losses, --moe-aux-loss-coeff has {len(weights)} "
            "values; give one value for each."
        )
    else:
        for kind, weight in zip(kinds, weights, strict=True):
            if weight and kind in ("seq_aux_loss", "global_aux_loss"):
                yield (
                    f"--moe-router-load-balancing-type {kind} with --moe-aux-loss-coeff {weight}: micro-batches have "
                    "many sequences, and steps different numbers of them; use aux_loss, or the coefficient 0."
                )
    if any(weight and weight < 0 for weight in weights):
        yield f"--moe-aux-loss-coeff {weights} must be at least 0."
