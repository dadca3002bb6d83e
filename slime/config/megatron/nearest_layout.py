"""The nearest size of a parallel layout that works: with the model, with the GPUs, and with the other sizes.

Rules are arithmetic here, without sentences; layout_checks.py has those, and asks for a size to name in them.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime.config.args import Args
from slime.config.megatron.derived import (
    Layout,
    divisors,
    ffn_size,
    layers_to_split,
    query_groups,
    virtual_stages,
)
from slime.utils.pipeline_layout import text_problem

OPTIONS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
}
"""Sizes whose product is the GPUs of one copy of the model."""
OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""What can be given of pipeline stages, apart from --num-virtual-stages-per-pipeline-rank, which may be 1."""


def resized(args: Args, **sizes: int) -> Args:
    """The flags with other sizes."""
    return Args.of(vars(args) | sizes)


def nearest_size(args: Args, name: str, wanted: int, candidates: Iterable[int]) -> int:
    """The candidate for an attribute that is nearest to what is wanted, of those that break the fewest rules."""
    return min(candidates, key=lambda n: (broken_rules(resized(args, **{name: n})), abs(n - wanted), n))


def fitting_sizes(args: Args, name: str) -> list[int]:
    """Sizes for one of OPTIONS by which model and GPUs divide, ascending; other sizes aside."""
    layout = Layout.of(args)
    fits = {
        "tensor_model_parallel_size": lambda n: tensor_fits(args, n),
        "pipeline_model_parallel_size": lambda n: stages_fit(args, n),
        "context_parallel_size": lambda n: heads_fit(args, layout.tensor * n),
    }[name]
    return [n for n in divisors(max(1, layout.world)) if fits(n)]


def broken_rules(args: Args) -> int:
    """How many rules of sizes are broken: what should divide does not."""
    layout = Layout.of(args)
    experts, spread = args.num_moe_experts or 0, layout.expert_tensor * layout.expert * layout.pipeline
    instances = max(1, args.num_distributed_optimizer_instances)
    rules = (
        layout.world % layout.model == 0,
        tensor_fits(args, layout.tensor),
        stages_fit(args, layout.pipeline),
        layout.context == 1 or heads_fit(args, layout.tensor * layout.context),
        layout.data * layout.context % instances == 0,
        experts < 1 or experts % layout.expert == 0,
        experts < 1 or expert_ffn(args) % layout.expert_tensor == 0,
        experts < 1 or layout.world % spread == 0,
        experts < 1 or layout.world // spread % instances == 0,
    )
    return rules.count(False)


def tensor_parts(args: Args) -> dict[str, int]:
    """What is split over tensor-parallel ranks, apart from keys and values: option -> number."""
    parts = {"--num-attention-heads": args.num_attention_heads, "--ffn-hidden-size": ffn_size(args)}
    if args.padded_vocab_size:
        parts["--padded-vocab-size"] = args.padded_vocab_size
    if args.linear_attention_freq is not None:
        parts["--linear-num-key-heads"] = args.linear_num_key_heads
        parts["--linear-num-value-heads"] = args.linear_num_value_heads
    return parts


def tensor_fits(args: Args, tensor: int) -> bool:
    """All that is split over tensor-parallel ranks divides by their number."""
    parts = [*tensor_parts(args).values(), shared_expert(args)]
    return groups_fit(args, tensor) and all(number % tensor == 0 for number in parts)


def groups_fit(args: Args, tensor: int) -> bool:
    """Heads of keys and values divide over the ranks, or each is shared by as many of them."""
    groups = query_groups(args)
    return not groups or args.multi_latent_attention or tensor % groups == 0 or groups % tensor == 0


def heads_fit(args: Args, ranks: int) -> bool:
    """Heads divide over tensor- and context-parallel ranks where these exchange heads."""
    kinds = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    return "a2a" not in kinds or args.num_attention_heads % ranks == 0


def expert_ffn(args: Args) -> int:
    """Width of an expert."""
    return int(args.moe_ffn_hidden_size or ffn_size(args))


def shared_expert(args: Args) -> int:
    """Width of the shared expert; 0 without one."""
    return int(args.num_moe_experts and args.moe_shared_expert_intermediate_size or 0)


def middle_stages(args: Args, pipeline: int) -> tuple[int, int]:
    """(ranks, layers) apart from a first and a last stage of their own size."""
    given = (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage)
    ends = [layers for layers in given if layers is not None]
    return pipeline - len(ends), layers_to_split(args) - sum(ends)


def stages_fit(args: Args, pipeline: int) -> bool:
    """Layers divide into the pipeline's stages, virtual ones included."""
    if pipeline == 1:
        return (
            not any(vars(args)[name] for name in OF_STAGES) and (args.num_virtual_stages_per_pipeline_rank or 1) == 1
        )
    if text := args.pipeline_model_parallel_layout:
        layers, predicting = args.num_layers, args.mtp_num_layers or 0
        return text_problem(text, pipeline, num_layers=layers, num_mtp_layers=predicting) is None
    ranks, layers = middle_stages(args, pipeline)
    if (ranks < 1 or layers < 1 or layers % ranks) and (ranks or layers):
        return False
    ends = [args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage]
    counts = [layers // ranks if ranks else None, *ends]
    virtual, group = virtual_stages(args, pipeline) or 1, args.microbatch_group_size_per_vp_stage
    if args.num_layers_per_virtual_pipeline_stage:
        return ends == [None, None] and layers // ranks % args.num_layers_per_virtual_pipeline_stage == 0
    if virtual > 1 and (pipeline > (group or pipeline) or (pipeline == 2 and not args.overlap_p2p_comm)):
        return False
    return all(count is None or count % virtual == 0 for count in counts)
