"""What is wrong with the sizes of a parallel layout, with the nearest ones that would work.

It does arithmetic on flags. Whether slime can train with a layout is said in megatron_flags.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import (
    OPTIONS,
    Layout,
    broken_rules,
    divisors,
    expert_ffn,
    fitting_sizes,
    groups_fit,
    heads_fit,
    middle_stages,
    nearest_divisor,
    nearest_size,
    query_groups,
    resized,
    shared_expert,
    stages_fit,
    tensor_parts,
)
from slime.config.megatron.training_checks import check_instances
from slime.config.problems import Check, NoEffect, Rule, broken, where
from slime.plan.pipeline_layout import text_problem

ALLGATHER_CP_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""HF architectures with sparse attention."""
PIPELINE = "pipeline_model_parallel_size"
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
    problems = [*broken(SIZES, args), *check_pipeline_layers(args, Layout.of(args)), *broken(ROWS, args)]
    return [*problems, *check_instances(args), *check_allgather_cp(args, hf_config)]


def _divides(args: Args) -> bool:
    layout = Layout.of(args)
    return layout.world % layout.model == 0


def _world(args: Args) -> str:
    """The sentence on GPUs that do not make whole copies of the model."""
    layout, given = Layout.of(args), [name for name in OPTIONS if vars(args)[name] > 1]
    product = " x ".join(f"{OPTIONS[name]} {vars(args)[name]}" for name in given)
    works = [*_gpus_that_work(args, layout), *_sizes_that_work(args, given)] or [f"{layout.model} GPUs"]
    return (
        f"{layout.world} trainer GPUs or slots (--actor-num-nodes x --actor-num-gpus-per-node) do not divide by "
        f"{product}{f' = {layout.model}' if len(given) > 1 else ''}; the nearest that works: {', or '.join(works)}."
    )


def _gpus_that_work(args: Args, layout: Layout) -> Iterator[str]:
    """GPUs for the sizes as they are; none where these would be wrong for the model, too."""
    of_experts = layout.expert_tensor * layout.expert * layout.pipeline if args.num_moe_experts else 1
    unit = math.lcm(layout.model, of_experts)
    below = layout.world // unit * unit
    numbers = [n for n in (below, below + unit) if n]
    if not broken_rules(resized(args, actor_num_nodes=1, actor_num_gpus_per_node=numbers[-1])):
        yield f"{' or '.join(map(str, numbers))} GPUs"


def _sizes_that_work(args: Args, names: Sequence[str]) -> Iterator[str]:
    """Another size, each by itself; all together where changing one is not enough."""
    fitting = {name: sizes for name in names if (sizes := fitting_sizes(args, name))}
    alone = {name: nearest_size(args, name, vars(args)[name], sizes) for name, sizes in fitting.items()}
    works = [f"{OPTIONS[name]} {size}" for name, size in alone.items() if _divides(resized(args, **{name: size}))]
    if works or len(fitting) < len(names):
        yield from works
        return
    together = resized(args, **dict.fromkeys(names, 1))
    for name, sizes in fitting.items():
        together = resized(together, **{name: nearest_size(together, name, vars(args)[name], sizes)})
    if _divides(together):
        yield " with ".join(f"{OPTIONS[name]} {vars(together)[name]}" for name in names)


def _nearest(args: Args, name: str) -> int | None:
    """The nearest size for one of OPTIONS; None where none fits the model."""
    sizes = fitting_sizes(args, name)
    return nearest_size(args, name, vars(args)[name], sizes) if sizes else None


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


def _stage_flags(args: Args, *kinds: str) -> dict[str, Any]:
    """Option -> value of those that are given; one virtual stage is as good as none."""
    options = {option: name for kind in kinds or STAGE_FLAGS for option, name in STAGE_FLAGS[kind].items()}
    values = {option: vars(args)[name] for option, name in options.items()}
    nothing = ("--num-virtual-stages-per-pipeline-rank", 1)
    return {option: n for option, n in values.items() if not (n is None or n is False or (option, n) == nothing)}


def _no_stages(args: Args) -> str:
    """The sentence on flags of stages without a pipeline."""
    given, size = _stage_flags(args), _nearest_pipeline(args)
    shown = " and ".join(option if value is True else f"{option} {value}" for option, value in given.items())
    nearest = f"the nearest that works is {size}, or leave" if size else "leave"
    them = "it" if len(given) == 1 else "them"
    return f"{shown} cannot be met with --pipeline-model-parallel-size 1; {nearest} {them} out."


SIZES: tuple[Check, ...] = (
    Rule(lambda a: not _divides(a), _world),
    Rule(
        _undivided,
        lambda a: (
            f"{', '.join(_undivided(a))} {'does' if len(_undivided(a)) == 1 else 'do'} not divide by "
            f"--tensor-model-parallel-size {Layout.of(a).tensor}; the nearest that works is "
            f"{_nearest(a, 'tensor_model_parallel_size')}."
        ),
    ),
    Rule(
        lambda a: query_groups(a) and a.num_attention_heads % query_groups(a),
        lambda a: (
            f"--num-attention-heads {a.num_attention_heads} does not divide by --num-query-groups {query_groups(a)}; "
            f"the nearest that works is {nearest_divisor(query_groups(a), [a.num_attention_heads])}."
        ),
    ),
    # flags that divide layers over pipeline stages fit each other, and there are stages
    Rule(lambda a: _stage_flags(a) and Layout.of(a).pipeline == 1, _no_stages),
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
)


def check_pipeline_layers(args: Args, layout: Layout) -> Iterator[str]:
    """The layers divide into equal pipeline stages, apart from a first and a last stage of their own size."""
    text = args.pipeline_model_parallel_layout
    if text and layout.pipeline > 1:
        layers, predicting = args.num_layers, args.mtp_num_layers or 0
        if problem := text_problem(text, layout.pipeline, num_layers=layers, num_mtp_layers=predicting):
            yield f"--pipeline-model-parallel-layout {text}: {problem}."
    if layout.pipeline == 1 or text:
        return
    stages, layers = middle_stages(args, layout.pipeline)
    if (stages or layers) and (stages < 1 or layers < 1 or layers % stages):
        works = list(_stages_that_work(args, layout)) or [f"{OPTIONS[PIPELINE]} 1 with no other flag of stages"]
        yield f"{_wrong_stages(args, layout)}; the nearest that works: {', or '.join(works)}."
        return
    yield from _check_virtual_stages(args, layout, layers // stages if stages else None)


def _nearest_pipeline(args: Args) -> int | None:
    """The nearest number of stages; None where it would break another rule, such as that GPUs divide."""
    size = _nearest(args, PIPELINE)
    return size if size and broken_rules(resized(args, **{PIPELINE: size})) < broken_rules(args) else None


def _wrong_stages(args: Args, layout: Layout) -> str:
    """The beginning of a sentence on layers that do not divide into stages."""
    stages, layers = middle_stages(args, layout.pipeline)
    size = f"{OPTIONS[PIPELINE]} {layout.pipeline}"
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


def _stages_that_work(args: Args, layout: Layout) -> Iterator[str]:
    """Another number of stages, or of layers at one of the ends, or other things counted as layers."""
    if (size := _nearest_pipeline(args)) is not None:
        yield f"{OPTIONS[PIPELINE]} {size}"
    counted, ends = ([name for name in names if vars(args)[name]] for names in (COUNTED, ENDS))
    for name in ends or ([] if counted else list(ENDS)[:1]):
        given = vars(args)[name] or args.num_layers // layout.pipeline
        counts = [n for n in range(1, args.num_layers) if stages_fit(resized(args, **{name: n}), layout.pipeline)]
        if counts:
            yield f"{ENDS[name]} {min(counts, key=lambda n: abs(n - given))}"
    for name in COUNTED if counted else ():
        if stages_fit(resized(args, **{name: not vars(args)[name]}), layout.pipeline):
            option = f"--{name.replace('_', '-')}"
            yield f"{option} left out" if vars(args)[name] else f"{option} as well"


def _check_virtual_stages(args: Args, layout: Layout, equal: int | None) -> Iterator[str]:
    """The layers of every rank divide into its virtual stages; `equal` are those of a rank between the ends."""
    parts = {
        "a stage of": equal,
        "--decoder-first-pipeline-num-layers": args.num_layers_in_first_pipeline_stage,
        "--decoder-last-pipeline-num-layers": args.num_layers_in_last_pipeline_stage,
    }
    numbers = {what: layers for what, layers in parts.items() if layers and layers > 0}
    per_virtual = args.num_layers_per_virtual_pipeline_stage
    if per_virtual and per_virtual > 0:
        if uneven := [option for option in numbers if option.startswith("--")]:
            most = math.gcd(*numbers.values())
            stages = nearest_divisor(max(2, layout.virtual), [most])
            remedy = f"give --num-virtual-stages-per-pipeline-rank {stages} instead" if most > 1 else "leave it out"
            yield (
                f"--num-layers-per-virtual-pipeline-stage {per_virtual} is for stages of one size and does not go "
                f"with {' and '.join(uneven)}; {remedy}."
            )
        elif equal and equal % per_virtual:
            nearest = nearest_divisor(per_virtual, [equal])
            yield (
                f"--num-layers-per-virtual-pipeline-stage {per_virtual} does not divide a stage of {equal} layers; "
                f"the nearest that works is {nearest}."
            )
        return
    for what, layers in numbers.items():
        if layers % layout.virtual:
            yield (
                f"--num-virtual-stages-per-pipeline-rank {layout.virtual} does not divide {what} {layers} layers; "
                f"the nearest that works is {nearest_divisor(layout.virtual, numbers.values())}."
            )


def _nearest_spread(layout: Layout, experts: int, ffn: int, of_stage: int) -> str:
    """The size that works with the GPUs of a pipeline stage: EP's with this ETP, or ETP's where none would."""
    if of_stage % layout.expert_tensor == 0:
        nearest = nearest_divisor(layout.expert, [experts, of_stage // layout.expert_tensor])
        return f"--expert-model-parallel-size that works is {nearest}"
    nearest = nearest_divisor(layout.expert_tensor, [ffn, of_stage])
    more = nearest_divisor(layout.expert, [experts, of_stage // nearest])
    return f"--expert-tensor-parallel-size that works is {nearest}, with --expert-model-parallel-size {more}"


def _spread(layout: Layout) -> int:
    """Ranks that share all experts, of all pipeline stages."""
    return layout.expert_tensor * layout.expert * layout.pipeline


def _divided_experts(args: Args) -> str:
    """The sentence on experts that do not divide over their ranks."""
    layout, experts = Layout.of(args), args.num_moe_experts or 1
    sizes = divisors(math.gcd(experts, layout.world))
    return (
        f"--num-experts {experts} does not divide by --expert-model-parallel-size {layout.expert}; the nearest that "
        f"works is {nearest_size(args, 'expert_model_parallel_size', layout.expert, sizes)}."
    )


def _divided_ffn(args: Args) -> str:
    """The sentence on an expert's width that does not divide over its ranks."""
    layout, ffn = Layout.of(args), expert_ffn(args)
    sizes = divisors(math.gcd(ffn, layout.world))
    return (
        f"--moe-ffn-hidden-size {ffn} does not divide by --expert-tensor-parallel-size {layout.expert_tensor}; the "
        f"nearest that works is {nearest_size(args, 'expert_tensor_parallel_size', layout.expert_tensor, sizes)}."
    )


def _divided_gpus(args: Args) -> str:
    """The sentence on GPUs over which experts cannot be spread."""
    layout = Layout.of(args)
    of_stage = max(1, layout.world // layout.pipeline)
    nearest = _nearest_spread(layout, args.num_moe_experts or 1, expert_ffn(args), of_stage)
    return (
        f"{layout.world} trainer GPUs or slots do not divide by --expert-tensor-parallel-size {layout.expert_tensor} "
        f"x --expert-model-parallel-size {layout.expert} x --pipeline-model-parallel-size {layout.pipeline} = "
        f"{_spread(layout)}; the nearest {nearest}."
    )


ROWS: tuple[Check, ...] = (
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
    # experts exist where they are spread, and divide over their ranks
    Rule(
        lambda a: (a.num_moe_experts or 0) < 1 and Layout.of(a).expert > 1,
        "--expert-model-parallel-size {expert_model_parallel_size} needs --num-experts; leave it out of a dense "
        "model.",
    ),
    where(
        lambda a: (a.num_moe_experts or 0) >= 1,
        Rule(lambda a: (a.num_moe_experts or 1) % Layout.of(a).expert, _divided_experts),
        Rule(lambda a: expert_ffn(a) % Layout.of(a).expert_tensor, _divided_ffn),
        Rule(
            lambda a: shared_expert(a) % Layout.of(a).tensor,
            lambda a: (
                f"--moe-shared-expert-intermediate-size {shared_expert(a)} does not divide by "
                f"--tensor-model-parallel-size {Layout.of(a).tensor}; the nearest that works is "
                f"{_nearest(a, 'tensor_model_parallel_size') or 1}."
            ),
        ),
        Rule(lambda a: Layout.of(a).world % _spread(Layout.of(a)), _divided_gpus),
        Rule(  # multi-latent attention needs it, too, and says so itself
            lambda a: Layout.of(a).tensor > 1 and not a.sequence_parallel and not a.multi_latent_attention,
            "--num-experts {num_moe_experts} with --tensor-model-parallel-size {tensor_model_parallel_size} needs "
            "--sequence-parallel.",
        ),
    ),
    Rule(  # attention can be split over context-parallel ranks as asked
        lambda a: Layout.of(a).context > 1 and not heads_fit(a, Layout.of(a).tensor * Layout.of(a).context),
        lambda a: (
            f"--cp-comm-type a2a: --num-attention-heads {a.num_attention_heads} does not divide by "
            f"--tensor-model-parallel-size {Layout.of(a).tensor} x --context-parallel-size {Layout.of(a).context} = "
            f"{Layout.of(a).tensor * Layout.of(a).context}; the nearest --context-parallel-size that works is "
            f"{_nearest(a, 'context_parallel_size') or 1}."
        ),
    ),
)


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
