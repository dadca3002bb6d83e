"""What is wrong with the sizes of a parallel layout, with the nearest ones that would work.

It does arithmetic on flags. Whether slime can train with a layout is said in megatron_flags.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import Layout, divisors, nearest_divisor, query_groups
from slime.config.megatron.nearest_layout import (
    OPTIONS,
    broken_rules,
    expert_ffn,
    fitting_sizes,
    groups_fit,
    heads_fit,
    middle_stages,
    nearest_size,
    resized,
    shared_expert,
    stages_fit,
    tensor_parts,
)
from slime.config.megatron.training_checks import check_instances
from slime.config.problems import NoEffect
from slime.utils.pipeline_layout import text_problem

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
    layout = Layout.of(args)
    checks: tuple[Callable[[Args, Layout], Iterator[str]], ...] = (
        check_world,
        check_tensor,
        check_pipeline_flags,
        check_pipeline_layers,
        check_interleaving,
        check_experts,
        check_context,
        check_instances,
    )
    problems = [sentence for check in checks for sentence in check(args, layout)]
    return problems + list(check_allgather_cp(args, hf_config))


def check_world(args: Args, layout: Layout) -> Iterator[str]:
    """The trainer's GPUs make whole copies of the model."""
    if layout.world % layout.model == 0:
        return
    given = [name for name in OPTIONS if vars(args)[name] > 1]
    product = " x ".join(f"{OPTIONS[name]} {vars(args)[name]}" for name in given)
    works = [*_gpus_that_work(args, layout), *_sizes_that_work(args, given)] or [f"{layout.model} GPUs"]
    yield (
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


def _divides(args: Args) -> bool:
    layout = Layout.of(args)
    return layout.world % layout.model == 0


def _nearest(args: Args, name: str) -> int | None:
    """The nearest size for one of OPTIONS; None where none fits the model."""
    sizes = fitting_sizes(args, name)
    return nearest_size(args, name, vars(args)[name], sizes) if sizes else None


def check_tensor(args: Args, layout: Layout) -> Iterator[str]:
    """What is split over tensor-parallel ranks divides by their number."""
    size, groups, parts = layout.tensor, query_groups(args), tensor_parts(args)
    if not groups_fit(args, size):  # more ranks than groups may share heads
        parts["--num-query-groups"] = groups
    bad = [f"{option} {number}" for option, number in parts.items() if number % size]
    if bad:
        verb = "does" if len(bad) == 1 else "do"
        yield (
            f"{', '.join(bad)} {verb} not divide by --tensor-model-parallel-size {size}; "
            f"the nearest that works is {_nearest(args, 'tensor_model_parallel_size')}."
        )
    if groups and args.num_attention_heads % groups:
        nearest = nearest_divisor(groups, [args.num_attention_heads])
        yield (
            f"--num-attention-heads {args.num_attention_heads} does not divide by --num-query-groups {groups}; "
            f"the nearest that works is {nearest}."
        )


def check_pipeline_flags(args: Args, layout: Layout) -> Iterator[str]:
    """Flags that divide layers over pipeline stages fit each other, and there are stages."""
    uneven = {
        "--decoder-first-pipeline-num-layers": args.num_layers_in_first_pipeline_stage,
        "--decoder-last-pipeline-num-layers": args.num_layers_in_last_pipeline_stage,
    }
    counted = {
        "--account-for-embedding-in-pipeline-split": args.account_for_embedding_in_pipeline_split or None,
        "--account-for-loss-in-pipeline-split": args.account_for_loss_in_pipeline_split or None,
    }
    virtual = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank
        if args.num_virtual_stages_per_pipeline_rank != 1
        else None,
    }
    text = {"--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout}
    uneven, counted, virtual, text = (  # type: ignore[assignment]
        {option: value for option, value in group.items() if value is not None}
        for group in (uneven, counted, virtual, text)
    )
    given = [*uneven, *counted, *virtual, *text]
    if given and layout.pipeline == 1:
        values = (uneven | counted | virtual | text).items()
        shown = " and ".join(option if value is True else f"{option} {value}" for option, value in values)
        size, them = _nearest_pipeline(args), "it" if len(given) == 1 else "them"
        nearest = f"the nearest that works is {size}, or leave" if size else "leave"
        yield f"{shown} cannot be met with --pipeline-model-parallel-size 1; {nearest} {them} out."
    if len(virtual) > 1:
        yield f"{' and '.join(virtual)} exclude each other; give one."
    if text and len(given) > 1:
        others = [option for option in given if option not in text]
        yield f"--pipeline-model-parallel-layout and {' and '.join(others)} exclude each other; give one."
    if uneven and counted:
        yield f"{' and '.join([*uneven, *counted])} exclude each other; give one kind."
    if any((value or 0) < 1 for value in uneven.values()):
        yield f"{' and '.join(f'{o} {n}' for o, n in uneven.items())} must be at least 1."


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


def check_interleaving(args: Args, layout: Layout) -> Iterator[str]:
    """Interleaved stages have as many micro-batches at a time as there are ranks, and ways to exchange them."""
    group = args.microbatch_group_size_per_vp_stage
    if group is not None and layout.virtual > 1 and group < layout.pipeline:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than --pipeline-model-parallel-size "
            f"{layout.pipeline}; give at least {layout.pipeline}, the default."
        )
    if layout.virtual > 1 and layout.pipeline == 2 and not args.overlap_p2p_comm:
        yield (
            "--no-overlap-p2p-communication with virtual stages needs --pipeline-model-parallel-size above 2: with 2 "
            "both neighbours of a rank are the same one, and their messages would mix; leave it out."
        )


def check_experts(args: Args, layout: Layout) -> Iterator[str]:
    """Experts exist where they are spread, and divide over their ranks."""
    experts = args.num_moe_experts
    if not experts or experts < 1:
        if layout.expert > 1:
            yield f"--expert-model-parallel-size {layout.expert} needs --num-experts; leave it out of a dense model."
        return
    if experts % layout.expert:
        nearest = nearest_size(
            args, "expert_model_parallel_size", layout.expert, divisors(math.gcd(experts, layout.world))
        )
        yield (
            f"--num-experts {experts} does not divide by --expert-model-parallel-size {layout.expert}; the "
            f"nearest that works is {nearest}."
        )
    ffn, shared = expert_ffn(args), shared_expert(args)
    if ffn % layout.expert_tensor:
        sizes = divisors(math.gcd(ffn, layout.world))
        nearest = nearest_size(args, "expert_tensor_parallel_size", layout.expert_tensor, sizes)
        yield (
            f"--moe-ffn-hidden-size {ffn} does not divide by --expert-tensor-parallel-size {layout.expert_tensor}; "
            f"the nearest that works is {nearest}."
        )
    if shared % layout.tensor:
        nearest = _nearest(args, "tensor_model_parallel_size") or 1
        yield (
            f"--moe-shared-expert-intermediate-size {shared} does not divide by --tensor-model-parallel-size "
            f"{layout.tensor}; the nearest that works is {nearest}."
        )
    spread = layout.expert_tensor * layout.expert * layout.pipeline
    if layout.world % spread:
        of_stage = max(1, layout.world // layout.pipeline)
        yield (
            f"{layout.world} trainer GPUs or slots do not divide by --expert-tensor-parallel-size "
            f"{layout.expert_tensor} x --expert-model-parallel-size {layout.expert} x --pipeline-model-parallel-size "
            f"{layout.pipeline} = {spread}; the nearest {_nearest_spread(layout, experts, ffn, of_stage)}."
        )
    if layout.tensor > 1 and not args.sequence_parallel and not args.multi_latent_attention:  # which needs it, too
        yield f"--num-experts {experts} with --tensor-model-parallel-size {layout.tensor} needs --sequence-parallel."


def _nearest_spread(layout: Layout, experts: int, ffn: int, of_stage: int) -> str:
    """The size that works with the GPUs of a pipeline stage: EP's with this ETP, or ETP's where none would."""
    if of_stage % layout.expert_tensor == 0:
        nearest = nearest_divisor(layout.expert, [experts, of_stage // layout.expert_tensor])
        return f"--expert-model-parallel-size that works is {nearest}"
    nearest = nearest_divisor(layout.expert_tensor, [ffn, of_stage])
    more = nearest_divisor(layout.expert, [experts, of_stage // nearest])
    return f"--expert-tensor-parallel-size that works is {nearest}, with --expert-model-parallel-size {more}"


def check_context(args: Args, layout: Layout) -> Iterator[str]:
    """Attention can be split over context-parallel ranks as asked."""
    spread = layout.tensor * layout.context
    if layout.context > 1 and not heads_fit(args, spread):
        nearest = _nearest(args, "context_parallel_size") or 1
        yield (
            f"--cp-comm-type a2a: --num-attention-heads {args.num_attention_heads} does not divide by "
            f"--tensor-model-parallel-size {layout.tensor} x --context-parallel-size {layout.context} = {spread}; the "
            f"nearest --context-parallel-size that works is {nearest}."
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
