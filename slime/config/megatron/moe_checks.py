"""What contradicts what among the flags of experts and of latent attention, apart from the layout (layout_checks.py).

It reads flags and returns sentences; num_moe_experts, num_layers and the like are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from slime.config.args import Args
from slime.config.megatron.layout import Layout
from slime.config.problems import NoEffect

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
