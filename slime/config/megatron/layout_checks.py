"""What is wrong with the sizes of a parallel layout, with the nearest layout that would work.

It does arithmetic on flags. Whether slime can train with a layout is said in megatron_flags.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import (
    OPTIONS,
    Layout,
    divisors,
    expert_ffn,
    groups_fit,
    heads_fit,
    middle_stages,
    nearest_divisor,
    query_groups,
    shared_expert,
    tensor_parts,
)
from slime.config.megatron.training_checks import check_instances
from slime.config.problems import Check, NoEffect, Rule, broken, where
from slime.plan.pipeline_layout import text_problem
from slime.utils.errors import sentences

ALLGATHER_CP_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""HF architectures with sparse attention."""
PARALLEL = OPTIONS | {
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
"""Sizes of a layout: attribute -> option."""
ENDS = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
}
COUNTED = {
    "account_for_embedding_in_pipeline_split": "the embedding",
    "account_for_loss_in_pipeline_split": "the loss",
}
"""What --account-for-... counts as a layer."""
DERIVED = ("padded_vocab_size", "expert_tensor_parallel_size")
"""What follows from --tensor-model-parallel-size where it is not given, and would hold the nearest one back."""


def layout_problems(
    args: Args, hf_config: Mapping[str, Any] | None, explicit: Collection[str] | None = None
) -> list[str]:
    """One sentence for each contradiction; the model's sizes (num_layers, ...) have to be given.

    Args:
        args: the flags, before or after derivation.
        hf_config: of the model, where there is one.
        explicit: attributes whose flags were given; None means unknown.
    """
    if explicit is not None:
        args = Args.of(vars(args) | {name: None for name in DERIVED if name not in explicit})
    problems = [*broken(SIZES, args)]
    if problems and (works := nearest_layout(args)):
        problems[-1] = f"{problems[-1].removesuffix('.')}; the nearest layout that works: {works}."
    return [*problems, *broken(FORMS, args), *check_instances(args), *check_allgather_cp(args, hf_config)]


def nearest_layout(args: Args) -> str | None:
    """The smallest change of one flag or two that leaves no size wrong; None where none does."""
    single = sorted(_changes(args), key=lambda change: change[0])
    few = [change for change in single if change[2].keys() <= PARALLEL.keys() or not all(change[2].values())]
    pairs = [(a + b, f"{one} with {two}", x | y) for (a, one, x), (b, two, y) in combinations(few, 2)]
    known = set(broken(FORMS, args))
    for _, text, values in [*single, *sorted(pairs, key=lambda change: change[0])]:
        changed = Args.of(vars(args) | values)
        if {*broken(SIZES, changed), *broken(FORMS, changed), *check_instances(changed)} <= known:
            return text
    return None


def _changes(args: Args) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(how far it is, in words, attribute -> value) of every change of one flag that could help."""
    for name, option in PARALLEL.items():
        for size in divisors(max(1, Layout.of(args).world)):
            yield abs(size - (vars(args)[name] or 1)), f"{option} {size}", {name: size}
    given = _stage_flags(args)
    for option in given:
        name = next(names[option] for names in STAGE_FLAGS.values() if option in names)
        for count in range(1, args.num_layers) if name in COUNTS else ():
            yield abs(count - given[option]), f"{option} {count}", {name: count}
        yield args.num_layers, f"{option} left out", {name: False if given[option] is True else None}


def _world(args: Args) -> str:
    """The sentence on GPUs that do not make whole copies of the model."""
    layout, given = Layout.of(args), [name for name in OPTIONS if vars(args)[name] > 1]
    product = " x ".join(f"{OPTIONS[name]} {vars(args)[name]}" for name in given)
    return (
        f"{layout.world} trainer GPUs or slots (--actor-num-nodes x --actor-num-gpus-per-node) do not divide by "
        f"{product}{f' = {layout.model}' if len(given) > 1 else ''}."
    )


def _undivided(args: Args) -> list[str]:
    """What does not divide by the number of tensor-parallel ranks, which share it."""
    size, parts = Layout.of(args).tensor, tensor_parts(args)
    if not groups_fit(args, size):  # more ranks than groups may share heads
        parts["--num-query-groups"] = query_groups(args)
    return [f"{option} {number}" for option, number in parts.items() if number % size]


STAGE_FLAGS = {
    "uneven": {option: name for name, option in ENDS.items()},
    "counted": {f"--{name.replace('_', '-')}": name for name in COUNTED},
    "virtual": {
        "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
        "--num-virtual-stages-per-pipeline-rank": "num_virtual_stages_per_pipeline_rank",
    },
    "text": {"--pipeline-model-parallel-layout": "pipeline_model_parallel_layout"},
}
"""Flags that divide layers over pipeline stages, by kind: option -> attribute."""
COUNTS = (*STAGE_FLAGS["uneven"].values(), *STAGE_FLAGS["virtual"].values())
"""Those that are a number."""


def _stage_flags(args: Args, *kinds: str) -> dict[str, Any]:
    """Option -> value of those that are given; one virtual stage is as good as none."""
    options = {option: name for kind in kinds or STAGE_FLAGS for option, name in STAGE_FLAGS[kind].items()}
    values = {option: vars(args)[name] for option, name in options.items()}
    nothing = ("--num-virtual-stages-per-pipeline-rank", 1)
    return {option: n for option, n in values.items() if not (n is None or n is False or (option, n) == nothing)}


def _no_stages(args: Args) -> str:
    """The sentence on flags of stages without a pipeline."""
    shown = (option if value is True else f"{option} {value}" for option, value in _stage_flags(args).items())
    return f"{' and '.join(shown)} cannot be met with --pipeline-model-parallel-size 1."


def _check_pipeline_layers(args: Args) -> Iterator[str]:
    """The layers divide into equal pipeline stages, apart from a first and a last stage of their own size."""
    layout, text = Layout.of(args), args.pipeline_model_parallel_layout
    if text and layout.pipeline > 1:
        layers, predicting = args.num_layers, args.mtp_num_layers or 0
        if problem := text_problem(text, layout.pipeline, num_layers=layers, num_mtp_layers=predicting):
            yield f"--pipeline-model-parallel-layout {text}: {problem}."
    if layout.pipeline == 1 or text:
        return
    stages, layers = middle_stages(args, layout.pipeline)
    if (stages or layers) and (stages < 1 or layers < 1 or layers % stages):
        yield f"{_wrong_stages(args, layout)}."
        return
    yield from _check_virtual_stages(args, layout, layers // stages if stages else None)


def _wrong_stages(args: Args, layout: Layout) -> str:
    """The sentence on layers that do not divide into stages."""
    stages, layers = middle_stages(args, layout.pipeline)
    size = f"{OPTIONS['pipeline_model_parallel_size']} {layout.pipeline}"
    ends = {what: vars(args)[name] for name, what in ENDS.items() if vars(args)[name] is not None}
    of_ends = " and ".join(f"{what} {count}" for what, count in ends.items())
    counted = [what for name, what in COUNTED.items() if vars(args)[name]]
    if stages < 1:
        return f"{of_ends} make {sum(ends.values())} layers in {size}, not --num-layers {args.num_layers}"
    where = f"--num-layers {args.num_layers}"
    if ends and layers < 1:
        return f"{of_ends} of {where} leaves no layer for the {stages} other of {size}"
    if ends:
        where += f" without {of_ends} leaves {layers}, which"
    elif counted:
        where += f" and {' and '.join(counted)} make {layers}, which"
    return f"{where} does not divide into {stages} pipeline stages of one size ({size})"


def _check_virtual_stages(args: Args, layout: Layout, equal: int | None) -> Iterator[str]:
    """The layers of every rank divide into its virtual stages; `equal` are those of a rank between the ends."""
    parts = {"a stage of": equal, **{option: vars(args)[name] for name, option in ENDS.items()}}
    numbers = {what: layers for what, layers in parts.items() if layers and layers > 0}
    uneven, size = (
        [option for option in numbers if option.startswith("--")],
        args.num_layers_per_virtual_pipeline_stage,
    )
    has_size = bool(size and size > 0)
    return sentences(
        (
            has_size and uneven,
            f"--num-layers-per-virtual-pipeline-stage {size} is for stages of one size and does not go with "
            f"{' and '.join(uneven)}; --num-virtual-stages-per-pipeline-rank does.",
        ),
        (
            has_size and not uneven and equal and equal % (size or 1),
            f"--num-layers-per-virtual-pipeline-stage {size} does not divide a stage of {equal} layers.",
        ),
        *(
            (
                not has_size and layers % layout.virtual,
                f"--num-virtual-stages-per-pipeline-rank {layout.virtual} does not divide {what} {layers} layers.",
            )
            for what, layers in numbers.items()
        ),
    )


def _spread(args: Args) -> int:
    """Ranks that share all experts, of all pipeline stages."""
    layout = Layout.of(args)
    return layout.expert_tensor * layout.expert * layout.pipeline


SIZES: tuple[Check, ...] = (
    Rule(lambda a: Layout.of(a).world % Layout.of(a).model, _world),
    Rule(
        _undivided,
        lambda a: (
            f"{', '.join(_undivided(a))} {'does' if len(_undivided(a)) == 1 else 'do'} not divide by "
            f"--tensor-model-parallel-size {Layout.of(a).tensor}."
        ),
    ),
    # flags that divide layers over pipeline stages fit each other, and there are stages
    Rule(lambda a: _stage_flags(a) and Layout.of(a).pipeline == 1, _no_stages),
    _check_pipeline_layers,
    # experts divide over their ranks
    where(
        lambda a: (a.num_moe_experts or 0) >= 1,
        Rule(
            lambda a: (a.num_moe_experts or 1) % Layout.of(a).expert,
            "--num-experts {num_moe_experts} does not divide by --expert-model-parallel-size "
            "{expert_model_parallel_size}.",
        ),
        Rule(
            lambda a: expert_ffn(a) % Layout.of(a).expert_tensor,
            lambda a: (
                f"--moe-ffn-hidden-size {expert_ffn(a)} does not divide by --expert-tensor-parallel-size "
                f"{Layout.of(a).expert_tensor}."
            ),
        ),
        Rule(
            lambda a: shared_expert(a) % Layout.of(a).tensor,
            lambda a: (
                f"--moe-shared-expert-intermediate-size {shared_expert(a)} does not divide by "
                f"--tensor-model-parallel-size {Layout.of(a).tensor}."
            ),
        ),
        Rule(
            lambda a: Layout.of(a).world % _spread(a),
            lambda a: (
                f"{Layout.of(a).world} trainer GPUs or slots do not divide by --expert-tensor-parallel-size "
                f"{Layout.of(a).expert_tensor} x --expert-model-parallel-size {Layout.of(a).expert} x "
                f"--pipeline-model-parallel-size {Layout.of(a).pipeline} = {_spread(a)}."
            ),
        ),
    ),
    Rule(  # attention can be split over context-parallel ranks as asked
        lambda a: Layout.of(a).context > 1 and not heads_fit(a, Layout.of(a).tensor * Layout.of(a).context),
        lambda a: (
            f"--cp-comm-type a2a: --num-attention-heads {a.num_attention_heads} does not divide by "
            f"--tensor-model-parallel-size {Layout.of(a).tensor} x --context-parallel-size {Layout.of(a).context} = "
            f"{Layout.of(a).tensor * Layout.of(a).context}."
        ),
    ),
)
"""What has to divide; another layout is the remedy."""
FORMS: tuple[Check, ...] = (
    Rule(
        lambda a: query_groups(a) and a.num_attention_heads % query_groups(a),
        lambda a: (
            f"--num-attention-heads {a.num_attention_heads} does not divide by --num-query-groups {query_groups(a)}; "
            f"the nearest that works is {nearest_divisor(query_groups(a), [a.num_attention_heads])}."
        ),
    ),
    Rule(
        lambda a: len(_stage_flags(a, "virtual")) > 1,
        lambda a: f"{' and '.join(_stage_flags(a, 'virtual'))} exclude each other; give one.",
    ),
    Rule(
        lambda a: _stage_flags(a, "text") and len(_stage_flags(a)) > 1,
        lambda a: (
            f"--pipeline-model-parallel-layout and {' and '.join(_stage_flags(a, 'uneven', 'counted', 'virtual'))} "
            "exclude each other; give one."
        ),
    ),
    Rule(
        lambda a: _stage_flags(a, "uneven") and _stage_flags(a, "counted"),
        lambda a: f"{' and '.join(_stage_flags(a, 'uneven', 'counted'))} exclude each other; give one kind.",
    ),
    Rule(
        lambda a: any(layers < 1 for layers in _stage_flags(a, "uneven").values()),
        lambda a: f"{' and '.join(f'{o} {n}' for o, n in _stage_flags(a, 'uneven').items())} must be at least 1.",
    ),
    # interleaved stages have as many micro-batches at a time as there are ranks, and ways to exchange them
    where(
        lambda a: Layout.of(a).virtual > 1,
        Rule(
            lambda a: (a.microbatch_group_size_per_vp_stage or math.inf) < Layout.of(a).pipeline,
            lambda a: (
                f"--microbatch-group-size-per-virtual-pipeline-stage {a.microbatch_group_size_per_vp_stage} is less "
                f"than --pipeline-model-parallel-size {Layout.of(a).pipeline}; give at least {Layout.of(a).pipeline}, "
                "the default."
            ),
        ),
        Rule(
            lambda a: Layout.of(a).pipeline == 2 and not a.overlap_p2p_comm,
            "--no-overlap-p2p-communication with virtual stages needs --pipeline-model-parallel-size above 2: with 2 "
            "both neighbours of a rank are the same one, and their messages would mix; leave it out.",
        ),
    ),
    Rule(
        lambda a: (a.num_moe_experts or 0) < 1 and Layout.of(a).expert > 1,
        "--expert-model-parallel-size {expert_model_parallel_size} needs --num-experts; leave it out of a dense "
        "model.",
    ),
    Rule(  # multi-latent attention needs it, too, and says so itself
        lambda a: (
            a.num_moe_experts and Layout.of(a).tensor > 1 and not (a.sequence_parallel or a.multi_latent_attention)
        ),
        "--num-experts {num_moe_experts} with --tensor-model-parallel-size {tensor_model_parallel_size} needs "
        "--sequence-parallel.",
    ),
)
"""Flags that need or exclude each other."""


def check_allgather_cp(args: Args, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """It asks for what sparse attention does: a rank gets the keys of all. Elsewhere it would be a worse layout."""
    if not vars(args).get("allgather_cp"):
        return
    if args.context_parallel_size <= 1:
        yield NoEffect(
            "--allgather-cp", "with --context-parallel-size 1", "leave it out", instead={"allgather_cp": False}
        )
        return
    architectures = (hf_config or {}).get("architectures") or []
    if not set(architectures) & set(ALLGATHER_CP_MODELS):
        yield (
            f"--allgather-cp with --context-parallel-size {args.context_parallel_size} is for the sparse attention of "
            f"{' and '.join(ALLGATHER_CP_MODELS)}, not for {', '.join(map(str, architectures)) or 'this model'}; "
            "leave it out."
        )
