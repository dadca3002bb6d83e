"""Who sits where, and with how much work: slots, parallel groups, pipeline stages, and the batches of a rollout.

`slot_layout` is what slime.ray.placement reserves; the plan shows the same slots without Ray. Slots are counted
in the order of that module: by node, then by GPU.

Lengths are not known before a run: the longest sample is the longest prompt plus the longest response; the expected
one has the measured mean prompt where the data could be read, and `MEAN_SHARE` of the longest response. Real lengths
are scheduled by slime.utils.dp_schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.plan.pipeline_layout import split_layers, split_text, stages_of_text
from slime.utils.misc import needed

if TYPE_CHECKING:
    from slime.config.args import Args


# Megatron's attribute -> what Megatron takes where no flag says otherwise
LAYOUT_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "num_distributed_optimizer_instances": 1,
    "microbatch_group_size_per_vp_stage": None,
}


@dataclass(frozen=True)
class SlotLayout:
    """How many slots a run takes, and where its engines begin."""

    num_trainers: int
    num_engine_slots: int
    engine_offset: int
    num_reward_slots: int = 0  # Of a managed reward model, behind all others

    @property
    def reward_offset(self) -> int:
        """The first slot of the reward model."""
        return max(self.num_trainers, self.engine_offset + self.num_engine_slots)

    @property
    def total(self) -> int:
        """Slots of the whole run."""
        return self.reward_offset + self.num_reward_slots

    @property
    def engine_slots(self) -> list[int]:
        """Every slot that an engine may take, in the order in which engines take them."""
        engines = range(self.engine_offset, self.engine_offset + self.num_engine_slots)
        return [*engines, *range(self.reward_offset, self.total)]


def slot_layout(args: Args) -> SlotLayout:
    """The layout that the cluster flags ask for (pure; `total` is what Ray must have)."""
    trainers = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    reward = args.reward_model_num_gpus or 0
    if args.debug_train_only:
        return SlotLayout(trainers, 0, 0)
    if args.rollout_external_engine_addrs:  # servers that run already
        return SlotLayout(trainers, 0, 0, reward)
    return SlotLayout(trainers, args.rollout_num_gpus, 0 if args.colocate else trainers, reward)


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the trainer's parallel groups, and which decoder layers each pipeline stage holds."""

    world_size: int
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    ep: int
    etp: int
    is_sequence_parallel: bool
    stage_layers: tuple[tuple[int, ...], ...]  # [pp][layers of the stage]
    optimizer_instances: int = 1  # Parts of the copies of the model, each of which holds the whole optimizer state
    # Micro-batches that an interleaved stage takes through one of its chunks before the next chunk
    group_size: int = 1

    @classmethod
    def of(cls, args: Args, num_layers: int) -> ParallelLayout:
        """The layout that the flags describe; sizes that do not divide are rounded down (validation refuses them)."""
        given = {name: value for name, value in vars(args).items() if name in LAYOUT_DEFAULTS and value is not None}
        values = LAYOUT_DEFAULTS | given
        world = args.actor_num_nodes * args.actor_num_gpus_per_node
        tp, pp, cp = (values[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
        vpp = _virtual_stages(values, num_layers)
        return cls(
            world_size=world,
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            dp=max(1, world // (tp * pp * cp)),
            ep=values["expert_model_parallel_size"],
            etp=values["expert_tensor_parallel_size"] or tp,
            is_sequence_parallel=values["sequence_parallel"] and tp > 1,
            stage_layers=tuple(map(tuple, _stage_layers(values, num_layers, vpp))),
            optimizer_instances=max(1, values["num_distributed_optimizer_instances"]),
            group_size=values["microbatch_group_size_per_vp_stage"] or pp,
        )

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.world_size // (self.etp * self.ep * self.pp))

    @property
    def optimizer_shards(self) -> int:
        """Ranks over which the optimizer's state is sharded: DP x CP, or those of one instance."""
        return max(1, self.dp * self.cp // self.optimizer_instances)

    @property
    def expert_optimizer_shards(self) -> int:
        """The same for experts."""
        return max(1, self.expert_dp // self.optimizer_instances)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A trainer rank's place in each group, in Megatron's order: tp runs fastest, then cp, dp and pp."""
        place = {}
        for name, size in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)):
            place[name], rank = rank % size, rank // size
        return place


def _virtual_stages(values: dict[str, Any], num_layers: int) -> int:
    if text := values["pipeline_model_parallel_layout"]:
        return len(stages_of_text(text)) // values["pipeline_model_parallel_size"]
    if per_stage := values["num_layers_per_virtual_pipeline_stage"]:
        counted = values["account_for_embedding_in_pipeline_split"] + values["account_for_loss_in_pipeline_split"]
        return max(1, (num_layers + counted) // values["pipeline_model_parallel_size"] // per_stage)
    return values["num_virtual_stages_per_pipeline_rank"] or values["virtual_pipeline_model_parallel_size"] or 1


def _stage_layers(values: dict[str, Any], num_layers: int, vpp: int) -> list[list[int]]:
    pp = values["pipeline_model_parallel_size"]
    if text := values["pipeline_model_parallel_layout"]:
        return split_text(text, pp)
    return split_layers(
        num_layers,
        pp,
        vpp=vpp,
        first=values["num_layers_in_first_pipeline_stage"],
        last=values["num_layers_in_last_pipeline_stage"],
        counts_embedding=values["account_for_embedding_in_pipeline_split"],
        counts_loss=values["account_for_loss_in_pipeline_split"],
    )


@dataclass(frozen=True)
class Seat:
    """One slot and who sits in it."""

    slot: int
    node: int
    gpu: int  # Number of the GPU (slot) on its node
    trainer_rank: int | None
    coordinates: dict[str, int]  # The trainer rank's place in each parallel group that has more than one member
    engine: int | None
    engine_name: str  # Model and kind of server where --sglang-config gives several, else ""
    engine_tp_rank: int | None


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one kind, in the order in which they take slots."""

    name: str
    num_gpus: int
    num_gpus_per_engine: int


def seats(
    layout: SlotLayout, parallel: ParallelLayout, engines: Sequence[EngineGroup], *, num_gpus_per_node: int
) -> list[Seat]:
    """Every slot of the run, in order.

    Args:
        layout: slots of the run.
        parallel: the trainer's groups.
        engines: kinds of engines; a kind named "placeholder" leaves its slots empty.
        num_gpus_per_node: slots of a node.
    """
    nobody: tuple[int | None, str, int | None] = (None, "", None)
    sitting: dict[int, tuple[int | None, str, int | None]] = {}
    slot, engine = layout.engine_offset, 0
    for group in engines:
        for start in range(slot, slot + group.num_gpus, group.num_gpus_per_engine):
            if group.name == "placeholder":
                continue
            for tp_rank in range(group.num_gpus_per_engine):
                sitting[start + tp_rank] = (engine, group.name, tp_rank)
            engine += 1
        slot += group.num_gpus
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}
    found = []
    for index in range(layout.total):
        rank = index if index < layout.num_trainers else None
        place = {} if rank is None else parallel.coordinates(rank)
        shown = {axis: at for axis, at in place.items() if sizes[axis] > 1}
        node, gpu = divmod(index, num_gpus_per_node)
        found.append(Seat(index, node, gpu, rank, shown, *sitting.get(index, nobody)))
    return found


# A response is expected to have this share of --rollout-max-response-len: between the runs where all are cut and those
# where most end early
MEAN_SHARE = 0.5
DEFAULT_PROMPT = 512  # Tokens of a prompt where neither the data nor --rollout-max-prompt-len says
DEFAULT_RESPONSE = 2048  # Tokens of the longest response where --rollout-max-response-len does not say


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sample: expected and longest."""

    mean_prompt: int
    max_prompt: int
    mean_response: int
    max_response: int

    @property
    def mean(self) -> int:
        """Prompt and response, expected."""
        return self.mean_prompt + self.mean_response

    @property
    def longest(self) -> int:
        """Prompt and response, the longest."""
        return self.max_prompt + self.max_response


@dataclass(frozen=True)
class DataFacts:
    """What reading the prompt file told: rows, and tokens of their prompts (None: no tokenizer)."""

    num_rows: int
    num_measured: int = 0  # Rows at the start whose prompts were measured
    mean_prompt: int | None = None
    max_prompt: int | None = None
    max_images: int = 0  # Most tokens of a prompt that are images; they are counted in its length, too


def together(one: DataFacts | None, other: DataFacts | None) -> DataFacts | None:
    """Facts about two files; the mean length is that of the rows that were measured."""
    if one is None or other is None:
        return one or other
    measured = [facts for facts in (one, other) if facts.num_measured]
    count = sum(facts.num_measured for facts in measured)
    if not count:
        return DataFacts(one.num_rows + other.num_rows)
    images = max(one.max_images, other.max_images)
    mean = round(sum(facts.num_measured * (facts.mean_prompt or 0) for facts in measured) / count)
    longest = max(facts.max_prompt or 0 for facts in measured)
    return DataFacts(one.num_rows + other.num_rows, count, mean, longest, images)


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of one rollout, and of the run."""

    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    samples_per_step: int
    steps_per_rollout: int
    samples_dropped: int  # Left over after the last whole train step of a rollout
    lengths: Lengths
    tokens_per_rollout: int  # Expected, prompts included
    response_tokens_per_rollout: int
    # Most tokens of a micro-batch on one GPU, its share of a sequence under context parallelism
    micro_batch_tokens: int
    micro_batch_response_tokens: int  # Of these, response tokens at most
    log_prob_tokens: int  # The same of a pass without gradients (--log-probs-max-tokens-per-gpu)
    log_prob_response_tokens: int
    image_tokens: int  # Expected of a micro-batch, on each of its context-parallel ranks; those of a prompt once
    micro_batches_per_rank: int  # Expected in each train step
    num_rollouts: int | None  # None: only the data source's length can tell
    epochs: float | None  # Passes over the prompts in the whole run; None where the data could not be read


def lengths_of(args: Args, facts: DataFacts | None) -> Lengths:
    """Expected and longest tokens; a context limit bounds both together."""
    facts = facts or DataFacts(0)
    is_whole = facts.max_prompt is not None and facts.num_measured == facts.num_rows
    sources = args.prompt_sources
    limits = [one.max_prompt_len for one in sources if one.max_prompt_len]
    limit = max(limits) if limits and len(limits) == len(sources) else args.rollout_max_prompt_len
    longest = max((one.max_response_len or args.rollout_max_response_len or 0 for one in sources), default=0)
    longest = longest or args.rollout_max_response_len or 0
    max_prompt = (None if limit and not is_whole else facts.max_prompt) or limit or DEFAULT_PROMPT
    max_prompt = min(max_prompt, limit or max_prompt)
    context = args.rollout_max_context_len
    max_response = longest or (context - 1 if context else DEFAULT_RESPONSE)
    is_demonstration = args.loss_type == "sft_loss"
    if is_demonstration and args.rollout_max_response_len is None:
        max_response = 0  # the whole conversation is the prompt
    if context:
        max_prompt, max_response = min(max_prompt, context - 1), min(max_response, context)
        max_response = min(max_response, max(context - max_prompt, 1))
    return Lengths(
        mean_prompt=min(facts.mean_prompt or max_prompt, max_prompt),
        max_prompt=max_prompt,
        mean_response=math.ceil(max_response * MEAN_SHARE),
        max_response=max_response,
    )


def batch_plan(args: Args, layout: ParallelLayout, facts: DataFacts | None) -> BatchPlan:
    """The batch arithmetic of a command line whose --rollout-batch-size is given."""
    prompts, per_prompt = args.rollout_batch_size, args.n_samples_per_prompt
    samples = prompts * per_prompt
    per_step = max(1, min(args.global_batch_size or samples, samples))
    lengths = lengths_of(args, facts)
    tokens, response_tokens = _tokens(args, layout, lengths, args.max_tokens_per_gpu, num_samples=per_step)
    forward_budget = args.log_probs_max_tokens_per_gpu or args.max_tokens_per_gpu
    forward_tokens, forward_responses = _tokens(args, layout, lengths, forward_budget, num_samples=samples)
    micro_batches = _num_micro_batches(args, layout, lengths, per_step)
    num_rollouts = _num_rollouts(args, facts)
    return BatchPlan(
        prompts_per_rollout=prompts,
        samples_per_prompt=per_prompt,
        samples_per_rollout=samples,
        samples_per_step=per_step,
        steps_per_rollout=samples // per_step,
        samples_dropped=samples % per_step,
        lengths=lengths,
        tokens_per_rollout=samples * lengths.mean,
        response_tokens_per_rollout=samples * lengths.mean_response,
        micro_batch_tokens=tokens,
        micro_batch_response_tokens=response_tokens,
        log_prob_tokens=forward_tokens,
        log_prob_response_tokens=forward_responses,
        image_tokens=_image_tokens(args, layout, lengths, facts),
        micro_batches_per_rank=micro_batches,
        num_rollouts=num_rollouts,
        epochs=num_rollouts * prompts / facts.num_rows if facts and num_rollouts is not None else None,
    )


def _is_dynamic(args: Args) -> bool:
    return bool(args.use_dynamic_batch_size and args.max_tokens_per_gpu)


def _tokens(
    args: Args, layout: ParallelLayout, lengths: Lengths, budget: int | None, *, num_samples: int
) -> tuple[int, int]:
    """(most tokens of a micro-batch on a GPU, response tokens among them) under a token budget per GPU."""
    if _is_dynamic(args) and budget:
        # A sample longer than the budget is a micro-batch by itself.
        tokens = max(min(budget * layout.cp, num_samples * lengths.longest), lengths.longest)
        responses = math.ceil(tokens * lengths.max_response / max(lengths.longest, 1))
    else:
        tokens, responses = args.micro_batch_size * lengths.longest, args.micro_batch_size * lengths.max_response
    padded = _round_up(math.ceil(tokens / layout.cp), layout.tp * args.data_pad_size_multiplier)
    if lengths.max_response == 0:
        responses = tokens  # a demonstration may be trained on every token
    return padded, math.ceil(responses / layout.cp)


def _image_tokens(args: Args, layout: ParallelLayout, lengths: Lengths, facts: DataFacts | None) -> int:
    """Tokens of images that the tower makes for one micro-batch, whose samples are mostly of one prompt."""
    if facts is None or not facts.max_images:
        return 0
    samples, limit = args.micro_batch_size, args.max_image_tokens_per_gpu if _is_dynamic(args) else None
    if _is_dynamic(args):
        samples = max(1, needed(args.max_tokens_per_gpu) * layout.cp // max(lengths.mean, 1))
        samples = min(samples, max(1, limit // facts.max_images)) if limit else samples
    prompts = samples if args.balance_by_flops else math.ceil(samples / args.n_samples_per_prompt) + 1
    return min(samples, prompts, args.rollout_batch_size) * facts.max_images


def _num_micro_batches(args: Args, layout: ParallelLayout, lengths: Lengths, per_step: int) -> int:
    """Expected number per rank and train step."""
    if _is_dynamic(args):
        size = max(1, needed(args.max_tokens_per_gpu) * layout.cp // max(lengths.mean, 1))
    else:
        size = args.micro_batch_size
    count = math.ceil(math.ceil(per_step / size) / layout.dp)
    # interleaved stages take so many at a time
    return _round_up(count, layout.group_size) if layout.vpp > 1 else count


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _num_rollouts(args: Args, facts: DataFacts | None) -> int | None:
    if args.num_rollout is not None:
        return int(args.num_rollout)
    if args.num_epoch is None or facts is None:
        return None
    return int(args.num_epoch * max(1, facts.num_rows // args.rollout_batch_size))
