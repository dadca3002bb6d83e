"""What contradicts what among Megatron's flags of a model: sizes, experts, attention that is not Megatron's own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import Layout, query_groups
from slime.config.megatron.flag_classes import option_of
from slime.config.problems import Check, Rule, WithoutEffect, each, first_of, for_each, where
from slime.models.deepseek import indexer_types
from slime.plan.layout import ParallelLayout
from slime.utils.misc import needed

_DELTA_NET = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_NORM_OVER_HEADS = ("get_minimax_m2_spec", "get_minimax_m2_layer_spec")


def _check_spec(args: Args) -> Iterator[str]:
    """That there is such a function, as far as the file says it: Megatron is not imported for it."""
    spec = args.spec
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


ATTENTION: tuple[Check, ...] = (
    _check_spec,
    Rule(
        lambda a: a.attention_output_gate and a.multi_latent_attention,
        "--attention-output-gate does not go with --multi-latent-attention, which has no such gate; drop one.",
    ),
    where(
        lambda a: a.tensor_model_parallel_size > query_groups(a),
        Rule(
            lambda a: a.attention_output_gate,
            lambda a: (
                f"--attention-output-gate with --tensor-model-parallel-size {a.tensor_model_parallel_size} and "
                f"--num-query-groups {query_groups(a)}: ranks that share a group would take each other's gates; use "
                "at most as many ranks as groups."
            ),
        ),
        Rule(
            lambda a: (a.spec or [""])[-1] in _NORM_OVER_HEADS,
            lambda a: (
                f"--spec {' '.join(a.spec or ())} with --tensor-model-parallel-size {a.tensor_model_parallel_size} "
                f"and --num-query-groups {query_groups(a)}: its norm goes over the keys of all heads, and ranks that "
                "share a group would count it twice; use at most as many ranks as groups."
            ),
        ),
    ),
    where(
        lambda a: a.experimental_attention_variant == "gated_delta_net",
        Rule(
            lambda a: a.linear_attention_freq is None,
            "--experimental-attention-variant gated_delta_net needs --linear-attention-freq, which says which layers "
            "have it: 4 leaves every 4th full.",
        ),
        Rule(
            lambda a: isinstance(a.linear_attention_freq, list) and len(a.linear_attention_freq) != a.num_layers,
            lambda a: (
                f"--linear-attention-freq lists {len(as_list(a.linear_attention_freq))} layers, --num-layers says "
                f"{a.num_layers}."
            ),
        ),
        first_of(
            for_each(
                lambda a: _DELTA_NET,
                lambda a, name: not vars(a)[name] or vars(a)[name] < 1,
                lambda a, name: (
                    f"--experimental-attention-variant gated_delta_net needs {option_of(name)} of at least 1, not "
                    f"{vars(a)[name]}."
                ),
            ),
            Rule(
                lambda a: needed(a.linear_num_value_heads) % needed(a.linear_num_key_heads),
                "--linear-num-value-heads {linear_num_value_heads} does not divide by --linear-num-key-heads "
                "{linear_num_key_heads}; every key head has as many value heads.",
            ),
        ),
    ),
    where(
        lambda a: a.experimental_attention_variant == "dsa",
        Rule(
            lambda a: not a.multi_latent_attention or a.q_lora_rank is None,
            "--experimental-attention-variant dsa needs --multi-latent-attention and --q-lora-rank, from whose "
            "queries indexers choose keys.",
        ),
        *each(
            "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk",
            lambda size: not size or size < 1,
            "--experimental-attention-variant dsa needs {option} of at least 1, not {value}.",
        ),
        Rule(
            lambda a: a.recompute_granularity == "selective" and "core_attn" in (a.recompute_modules or ["core_attn"]),
            "--experimental-attention-variant dsa does not go with --recompute-granularity selective of core_attn, "
            "which does not hand on what indexers read; give other --recompute-modules, or --recompute-granularity "
            "full.",
        ),
    ),
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


def _experts_of_groups(args: Args) -> int:
    """Experts among which a token's are chosen; 0 without groups that divide them."""
    experts, groups, group_topk = args.num_moe_experts or 0, args.moe_router_num_groups, args.moe_router_group_topk
    is_divided = groups and group_topk and experts % groups == 0 and group_topk <= groups
    return (group_topk or 0) * (experts // (groups or 1)) if is_divided else 0


def as_list(value: Any) -> list[Any]:
    """A value as a list of one; Megatron's options accept one per layer or per loss."""
    return value if isinstance(value, list) else [value]


def _balancing(args: Args) -> list[str]:
    return as_list(args.moe_router_load_balancing_type)


def _loss_weights(args: Args) -> list[Any]:
    return as_list(args.moe_aux_loss_coeff)


EXPERTS: tuple[Check, ...] = (
    Rule(
        lambda a: a.multi_latent_attention and Layout.of(a).tensor > 1 and not a.sequence_parallel,
        "--multi-latent-attention with --tensor-model-parallel-size {tensor_model_parallel_size} needs "
        "--sequence-parallel: without it Megatron counts the gradients of its norms once per rank.",
    ),
    where(
        lambda a: a.num_moe_experts,
        Rule(
            lambda a: a.moe_router_enable_expert_bias and a.moe_router_score_function != "sigmoid",
            "--moe-router-enable-expert-bias with --moe-router-score-function {moe_router_score_function}: the bias "
            "is added to sigmoid scores; use sigmoid.",
        ),
        Rule(
            lambda a: (
                a.moe_router_topk == 1 and a.moe_router_score_function == "softmax" and not a.moe_router_pre_softmax
            ),
            "--moe-router-topk 1 with softmax scores needs --moe-router-pre-softmax: the softmax over one expert is "
            "always 1.",
        ),
        WithoutEffect(
            lambda a: a.moe_router_num_groups and not a.moe_router_group_topk,
            "--moe-router-num-groups {moe_router_num_groups}",
            "without --moe-router-group-topk",
            "give both",
            {"moe_router_num_groups": None},
        ),
        where(
            _experts_of_groups,
            Rule(
                lambda a: a.moe_router_topk > _experts_of_groups(a),
                lambda a: (
                    f"--moe-router-topk {a.moe_router_topk} is more than the {_experts_of_groups(a)} experts of "
                    f"--moe-router-group-topk {a.moe_router_group_topk} of {a.moe_router_num_groups} groups."
                ),
            ),
            Rule(
                lambda a: a.moe_router_topk < (a.moe_router_group_topk or 0),
                "--moe-router-group-topk {moe_router_group_topk} is more than --moe-router-topk {moe_router_topk}: a "
                "group is ranked by the sum of its best topk / group-topk experts; use at most as many groups.",
            ),
        ),
        Rule(
            lambda a: a.moe_shared_expert_gate and not a.moe_shared_expert_intermediate_size,
            "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size.",
        ),
        first_of(
            Rule(
                lambda a: "sinkhorn" in _balancing(a),
                "--moe-router-load-balancing-type sinkhorn trains other choices than the engine's; use aux_loss.",
            ),
            Rule(
                lambda a: len(_balancing(a)) != len(_loss_weights(a)),
                lambda a: (
                    f"--moe-router-load-balancing-type names {len(_balancing(a))} losses, --moe-aux-loss-coeff has "
                    f"{len(_loss_weights(a))} values; give one value for each."
                ),
            ),
        ),
        for_each(
            lambda a: zip(_balancing(a), _loss_weights(a), strict=False),
            lambda a, loss: loss[1] and loss[0] in ("seq_aux_loss", "global_aux_loss"),
            lambda a, loss: (
                f"--moe-router-load-balancing-type {loss[0]} with --moe-aux-loss-coeff {loss[1]}: micro-batches have "
                "many sequences, and steps different numbers of them; use aux_loss, or the coefficient 0."
            ),
        ),
        Rule(
            lambda a: any(weight and weight < 0 for weight in _loss_weights(a)),
            lambda a: f"--moe-aux-loss-coeff {_loss_weights(a)} must be at least 0.",
        ),
    ),
)
