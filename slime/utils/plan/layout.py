"""Who sits where: the slots of a run, the parallel groups of the trainer and the layers of its pipeline stages.

`slot_layout` is what slime.ray.placement_group reserves; the plan shows the same slots without Ray. Slots are counted
in the order of that module: by node, then by GPU. It knows nothing about memory or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.pipeline_layout import split_layers, split_text, stages_of_text

if TYPE_CHECKING:
    from slime.config.args import Args


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
"""Megatron's attribute -> what Megatron takes where no flag says otherwise."""


@dataclass(frozen=True)
class SlotLayout:
    """How many slots a run takes, and where its engines begin."""

    num_trainers: int
    num_engine_slots: int
    engine_offset: int
    num_reward_slots: int = 0
    """Of a managed reward model, behind all others."""

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
    stage_layers: tuple[tuple[int, ...], ...]
    """[pp][layers of the stage]."""
    optimizer_instances: int = 1
    """Parts of the copies of the model, each of which holds the whole optimizer state."""
    group_size: int = 1
    """Micro-batches that an interleaved stage takes through one of its chunks before the next chunk."""

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
    gpu: int
    """Number of the GPU (slot) on its node."""
    trainer_rank: int | None
    coordinates: dict[str, int]
    """The trainer rank's place in each parallel group that has more than one member."""
    engine: int | None
    engine_name: str
    """Model and kind of server where --sglang-config gives several, else ""."""
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
