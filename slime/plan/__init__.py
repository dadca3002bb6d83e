"""The plan of a run: everything that `--dry-run` shows, made from the flags and from facts that the caller has read.

`make_plan` is pure: it reads no file, imports no torch and starts nothing. What needs a tokenizer, a data file, the
user's modules or the machine comes in as `Facts`. A part that cannot be planned (no model flags, no batch size) is
None, and `missing` says why. `dataclasses.asdict` of a plan is JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slime.plan import times
from slime.plan.fit import EngineMemory, Moment, engine_memory, moments
from slime.plan.layout import (
    MEAN_SHARE,
    BatchPlan,
    DataFacts,
    EngineGroup,
    ParallelLayout,
    Seat,
    SlotLayout,
    batch_plan,
    seats,
    slot_layout,
)
from slime.plan.times import DEFAULT_GPU, DEVICES, Device, cpu_device
from slime.plan.tower import Tower
from slime.plan.trainer_memory import TrainerMemory, trainer_memory
from slime.utils.errors import sentences
from slime.utils.model_shape import ModelShape
from slime.weights.formats import WeightFormat

if TYPE_CHECKING:
    from slime.config.args import Args


ASSUMED_HOST_MEMORY = 24 * 2**30
NO_SHAPE = (
    "the model's sizes: give its flags (scripts/models/*.sh) or --model-args-from-hf; memory and times are left out"
)


@dataclass(frozen=True)
class HookReport:
    """One hook of the command line."""

    flag: str
    path: str
    where: str | None  # file:line of what was loaded; None where it could not be
    problem: str | None


@dataclass(frozen=True)
class RowReport:
    """The first usable row of a data file, as the model will see it."""

    data: str  # "prompts", or the name of an evaluation data set
    path: str
    where: str | None  # file:line
    text: str | None
    pieces: list[tuple[str, bool]]  # SFT: the text in spans, each with whether it is trained on. Empty otherwise.
    num_tokens: int | None
    num_trained_tokens: int | None
    label: str | None
    problem: str | None


@dataclass(frozen=True)
class EngineKind:
    """Engines that are alike: a model of --sglang-config, or all."""

    group: EngineGroup
    settings: Mapping[str, Any] = field(default_factory=dict)  # ServerArgs values that differ from SGLang's own
    serves_policy: bool = True  # False: another model, whose size is not known from the flags


@dataclass(frozen=True)
class Facts:
    """What a plan needs and flags alone do not say."""

    device: Device | None = None
    data: DataFacts | None = None
    engines: list[EngineKind] | None = None  # None: all alike, as the cluster flags say
    # How --hf-checkpoint is quantised, and with it what engines store and are sent; None: it is not
    weight_format: WeightFormat | None = None
    tower: Tower | None = None  # Of a checkpoint that sees images
    adapted: tuple[str, ...] = ()  # Megatron's linear layers with LoRA adapters; none: the family is not known
    hooks: list[HookReport] = field(default_factory=list)
    rows: list[RowReport] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """A run before it starts; sizes in bytes, times in seconds."""

    device: Device
    params: dict[str, int] | None  # Parameters of each part of the model
    slots: SlotLayout
    layout: ParallelLayout | None
    seats: list[Seat]
    batch: BatchPlan | None
    trainer_memory: TrainerMemory | None
    critic_memory: TrainerMemory | None  # Of the critic, which takes turns with the actor on the same GPUs
    engine_memory: list[EngineMemory]
    fit: list[Moment]
    host_memory_per_node: int  # Pinned copies of weights, and what is offloaded; with GPUs
    phases: list[times.Phase]  # Of one rollout; estimates
    transport: times.Transport | None
    outputs: list[times.Output]
    hooks: list[HookReport]
    rows: list[RowReport]
    assumptions: list[str]
    missing: list[str]
    warnings: list[str]
    refused: list[str]

    @property
    def rollout_seconds(self) -> float:
        """Seconds of one rollout, its phases one after the other."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def does_fit(self) -> bool:
        """Whether every moment fits."""
        return all(moment.fits for moment in self.fit)


def make_plan(args: Args, facts: Facts | None = None) -> Plan:
    """Plan the run of a command line.

    Args:
        args: parsed and derived flags; none of them need be supported yet.
        facts: what was found out beside them.
    """
    facts = facts or Facts()
    device = facts.device or (cpu_device(ASSUMED_HOST_MEMORY) if args.accelerator == "cpu" else DEVICES[DEFAULT_GPU])
    shape, fmt = ModelShape.of(args), facts.weight_format
    tower_params = facts.tower.num_params if facts.tower else 0
    shape = shape and replace(shape, adapted=facts.adapted, tower_params=tower_params)
    layout = ParallelLayout.of(args, shape.num_layers if shape else 1)
    batch = batch_plan(args, layout, facts.data) if args.rollout_batch_size else None
    slots, node_size = slot_layout(args), _node_size(args)
    alike = EngineKind(EngineGroup("", slots.num_engine_slots, args.rollout_num_gpus_per_engine))
    kinds = facts.engines if facts.engines is not None else [alike] if slots.num_engine_slots else []
    serving = [kind for kind in kinds if kind.serves_policy and kind.group.name != "placeholder"]
    engines = [_memory_of(kind, shape, device, batch, fmt) for kind in serving if shape]
    trainers = _trainers(args, slots, shape, layout, batch, facts.tower)
    num_nodes = -(-slots.total // node_size)
    sends = times.transport(args, shape, device, num_nodes=num_nodes, fmt=fmt) if shape else None
    phases: list[times.Phase] = []
    if shape and batch:
        rollout = times.Rollout(args, shape, device, layout, batch)
        num_engines = max(1, sum(kind.group.num_gpus // kind.group.num_gpus_per_engine for kind in serving))
        trainer = trainers[0] if trainers else None
        phases = list(times.phases(rollout, trainer, engines, num_engines=num_engines, sends=sends))
    return Plan(
        device=device,
        params=shape.components if shape else None,
        slots=slots,
        layout=layout if shape else None,
        seats=seats(slots, layout, [kind.group for kind in kinds], num_gpus_per_node=node_size),
        batch=batch,
        trainer_memory=trainers[0] if trainers else None,
        critic_memory=trainers[1] if len(trainers) > 1 else None,
        engine_memory=engines,
        fit=moments(args, device, slots, trainers=trainers, engines=engines) if shape and batch else [],
        host_memory_per_node=_host_memory(args, slots, trainers, engines),
        phases=phases,
        transport=sends,
        outputs=times.outputs(args, shape, fmt),
        hooks=facts.hooks,
        rows=facts.rows,
        assumptions=_assumptions(args, device, batch, engines, facts),
        missing=[*facts.missing, *([] if shape else [NO_SHAPE])],
        warnings=facts.warnings,
        refused=facts.refused,
    )


def _trainers(
    args: Args,
    slots: SlotLayout,
    shape: ModelShape | None,
    layout: ParallelLayout,
    batch: BatchPlan | None,
    tower: Tower | None,
) -> list[TrainerMemory]:
    """The memory of the actor and of a critic; empty where it cannot be planned."""
    if not (shape and batch and slots.num_trainers):
        return []
    roles = (False, True) if args.use_critic else (False,)
    return [trainer_memory(args, shape, layout, batch, is_critic=is_critic, tower=tower) for is_critic in roles]


def _memory_of(
    kind: EngineKind, shape: ModelShape, device: Device, batch: BatchPlan | None, fmt: WeightFormat | None
) -> EngineMemory:
    num_gpus, name, longest = kind.group.num_gpus_per_engine, kind.group.name, batch.lengths.longest if batch else 1
    return engine_memory(shape, device, kind.settings, num_gpus=num_gpus, longest=longest, name=name, fmt=fmt)


def _node_size(args: Args) -> int:
    """Slots of a node; a machine without GPUs is one node."""
    if args.accelerator == "cpu":
        return max(1, slot_layout(args).total)
    return int(args.num_gpus_per_node)


def _host_memory(args: Args, slots: SlotLayout, trainers: list[TrainerMemory], engines: list[EngineMemory]) -> int:
    if args.accelerator == "cpu":
        return 0
    ranks = min(slots.num_trainers, _node_size(args))
    copies = sum(
        max(stage.host_copies + stage.state * bool(args.offload_train) for stage in trainer.stages)
        for trainer in trainers
    )
    weights = max((engine.weights for engine in engines), default=0) * bool(args.offload_rollout)
    return ranks * copies + min(slots.num_engine_slots, _node_size(args)) * weights


def _assumptions(
    args: Args, device: Device, batch: BatchPlan | None, engines: list[EngineMemory], facts: Facts
) -> list[str]:
    lengths = batch and batch.lengths
    return [
        f"device {device.name} with {device.memory_bytes / 1e9:.0f} GB; rates: {device.source}",
        *sentences(
            (
                lengths and not (facts.data and facts.data.mean_prompt),
                f"prompts of {lengths and lengths.mean_prompt} tokens: their lengths are not known",
            ),
            (
                lengths and lengths.max_response,
                f"responses of {lengths and lengths.mean_response} tokens on average, {MEAN_SHARE:.0%} of the longest "
                f"({lengths and lengths.max_response})",
            ),
            (
                any(engine.is_fraction_assumed for engine in engines) and not device.is_shared,
                f"--sglang-mem-fraction-static {engines[0].mem_fraction if engines else ''}, which SGLang chooses by "
                "itself",
            ),
            (
                batch and batch.image_tokens,
                f"{batch and batch.image_tokens} tokens of images in a micro-batch; times leave the tower out",
            ),
            (
                not (batch and batch.image_tokens) and args.multimodal_keys and facts.tower,
                "no images: how large those of the prompts are is not known",
            ),
            (
                args.lora_rank and not facts.adapted,
                "LoRA adapters on every linear layer: the model's family is not known",
            ),
            (
                args.rollout_external_engine_addrs,
                "the engines of --rollout-external-engine-addrs run on GPUs that are not in the plan",
            ),
        ),
        "times and memory are estimates: reward functions, tools and fragmentation are not in them",
    ]
