"""What a training run is made of: the rollout manager with its engines, the trainers, and whose turn it is on the GPUs
that they share. They are started, started again after a loss, and ended here, in the order that `TrainingRun` decides.

Wait graph of the start: the engines wait for nobody. Trainers load (processes, imports) meanwhile in any case; where
they share memory with engines they are built only when these run, for engines count on all memory that is free when
they start. Whichever fails first ends the start with its error.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slime.config.args import Args, with_run_keys
from slime.config.rules.batch import check_schedule_length, check_warmup
from slime.processes.wait import try_and_log
from slime.ray.actor_group import Beside, RayTrainGroup, ReleasedTrainGroup
from slime.ray.checkpoints import STATE_DEADLINE_S, resumed, settle_checkpoint
from slime.ray.placement import connect_ray, create_placement, usable
from slime.ray.rollout.manager import CONCURRENCY_GROUPS, LOAD_DEADLINE_S, RolloutManager
from slime.ray.rollout.servers import MEMORY_DEADLINE_S
from slime.ray.utils import ActorFailure, ActorLost, actor_env, get, on_this_node
from slime.utils.errors import UsageError, refuse

logger = logging.getLogger(__name__)

WORK_DEADLINE_S = 24 * 3600.0  # generation has no bound of its own; each request inside it has one
DISPOSE_DEADLINE_S = 60.0


class RunParts:
    """The parts of one run.

    Args:
        args: the parsed flags.

    Attributes:
        args: the flags of the run as they are now: with its keys, and after a loss with what it resumes from.
        manager: handle of the rollout manager; None before the start and after the end.
        actor, critic: the trainer ranks; None where there are none.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.manager: Any = None
        self.actor: RayTrainGroup | None = None
        self.critic: RayTrainGroup | None = None
        self._turns: GpuTurns | None = None

    @property
    def turns(self) -> GpuTurns:
        """Who has the GPUs."""
        assert self._turns is not None, "there is no rollout manager yet"
        return self._turns

    @property
    def groups(self) -> list[RayTrainGroup]:
        """The critic's ranks, if there are any, and the actor's, in the order in which they take the GPU."""
        return [group for group in (self.critic, self.actor) if group is not None]

    # ---- start

    def connect(self) -> Path | None:
        """Join a Ray, or start one; returns the folder of one that was started.

        Raises:
            UsageError: Ray has too few slots, or does not answer.
        """
        return connect_ray(self.args)

    def place(self) -> None:
        """Reserve the slots of all parts."""
        self.args = with_run_keys(self.args)
        self._placement = self._trainer_placement = create_placement(self.args)

    def create_manager(self) -> None:
        """Begin the rollout manager's process, which starts engines when it is asked to."""
        log_path = Path(self.args.output_dir).resolve() / "logs" / "rollout_manager.log"
        self.take_manager(
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RolloutManager)
            .options(
                num_cpus=0,
                max_restarts=0,
                runtime_env={"env_vars": actor_env()},
                scheduling_strategy=on_this_node(),  # where the prompt file was checked, and --save is
            )
            .remote(self.args, self._placement.engine_slots, log_path=str(log_path))
        )

    def take_manager(self, manager: Any) -> None:
        """Have this rollout manager, and take turns with its engines."""
        self.manager = manager
        self._turns = GpuTurns(self.args, manager)

    def start(self) -> dict[str, Any]:
        """Start engines and trainers side by side; returns what the trainers say (`start_side_by_side`).

        Raises:
            UsageError: a schedule needs the length of the run, and the data source does not know it.
        """
        if self.args.num_rollout is None:
            self._count_rollouts()
        return self._start_trainers(beside=self.manager.start.remote())

    def _count_rollouts(self) -> None:
        """Have --num-epoch as --num-rollout before trainers are made, whose schedules go over the whole run."""
        per_epoch = get(self.manager.count_rollouts_per_epoch.remote(), "the data source", LOAD_DEADLINE_S)
        if per_epoch:
            self.args = self.args.replace(num_rollout=self.args.num_epoch * per_epoch)
        if not self.args.debug_rollout_only:
            refuse([*check_schedule_length(self.args), *check_warmup(self.args)])

    def _start_trainers(self, beside: ray.ObjectRef) -> dict[str, Any]:
        self.args = settle_checkpoint(self.args)
        return start_side_by_side(self._create_trainers(), self.turns, beside, what="the start of the engines")

    def _create_trainers(self) -> list[RayTrainGroup]:
        """The trainer groups in the order in which they take the GPU: where they start in turn, the actor comes last,
        and is there for the weight sync."""
        if self.args.debug_rollout_only:
            return []
        if self.args.use_critic:
            self.critic = RayTrainGroup(self.args, self._trainer_placement, role="critic")
        group_cls = ReleasedTrainGroup if self.args.release_train else RayTrainGroup
        self.actor = group_cls(self.args, self._trainer_placement)
        return self.groups

    # ---- start again

    def end_trainers(self) -> None:
        """End what is left of trainers of which one is lost."""
        for group in self.groups:
            group.shutdown(graceful=False)

    def use_what_is_left(self, *, resumes: bool) -> None:
        """Reserve the slots of new trainers, which may be fewer (--elastic-dp).

        Args:
            resumes: from this run's newest checkpoint; else from what the run began with.

        Raises:
            ActorFailure: there are too few slots.
        """
        if not self.groups:  # --debug-rollout-only
            return
        args = resumed(self.args) if resumes else self.args
        self._trainer_placement, self.args = usable(self._placement, args)

    @property
    def world_size(self) -> int:
        """Slots of trainer ranks."""
        return len(self._trainer_placement.trainer_bundles)

    def start_again(self, under_way: ray.ObjectRef | None, *, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """Start new trainers, and a new rollout manager with its engines where it is lost, too; returns as `start`.

        Args:
            under_way: an evaluation that was begun, which the engines end first.
            meanwhile: called again and again while what was begun is waited for, which may wait for engines.
        """
        if self._has_manager():
            if self.args.update_weights_in_flight:
                get(self.manager.let_go_on.remote(), "the engines to go on", STATE_DEADLINE_S)
            self.turns.trainers_are_lost()
            if under_way is not None:
                with suppress(ActorFailure, UsageError):  # nobody takes its result
                    get(under_way, "the end of an evaluation", WORK_DEADLINE_S, meanwhile=meanwhile)
            ready = self.manager.begin_again.remote(self.args.load)
            get(ready, "the end of rollouts that were begun", WORK_DEADLINE_S, meanwhile=meanwhile)
        else:
            self.create_manager()
            ready = self.manager.start.remote()
        return self._start_trainers(beside=ready)

    def _has_manager(self) -> bool:
        try:
            get(self.manager.get_updatable_engines.remote(), "the rollout manager", STATE_DEADLINE_S)
        except ActorLost:
            return False
        return True

    # ---- end

    def end(self, *, graceful: bool) -> None:
        """End them all.

        Args:
            graceful: wait for the trainers; not those that may be stuck.
        """
        for group in self.groups:
            try_to_end("the trainers", functools.partial(group.shutdown, graceful=graceful))
        if self.manager is not None:
            dispose = self.manager.dispose
            try_to_end("the engines", lambda: get(dispose.remote(), "the end of the engines", DISPOSE_DEADLINE_S))
        self.actor = self.critic = self.manager = None


def try_to_end(what: str, action: Callable[[], Any]) -> None:
    """Do what ends a part of a run; a failure is logged, so that the other parts are ended as well."""
    try_and_log(f"ending {what}", action)


START_DEADLINE_S = 1800.0
WITHOUT_TRAINERS: dict[str, Any] = {
    "start_rollout_id": 0,
    "parallel_config": {"dp_size": 1, "cp_size": 1},
    "warnings": [],
}


def start_side_by_side(
    groups: Sequence[RayTrainGroup], turns: GpuTurns, engines: ray.ObjectRef, *, what: str
) -> dict[str, Any]:
    """Start the trainers while engines are starting; returns when all of them run.

    Args:
        groups: in the order in which they take the GPU, the actor last; none without trainers.
        turns: whose turn it is on GPUs that several share.
        engines: their start, which is under way.
        what: what that is called in an error.

    Returns:
        what the actor's rank 0 says of its start, with the warnings of all; `WITHOUT_TRAINERS` without any.
    """
    loading = {ref: name for group in groups for ref, name in group.load().items()}
    if turns.share_gpus:  # engines take a share of the memory that is free
        get(engines, what, START_DEADLINE_S, beside=loading)
    started = turns.start_trainers(groups, {engines: what}) if groups else [WITHOUT_TRAINERS]
    get(engines, what, START_DEADLINE_S)
    return {**started[-1], "warnings": [warning for one in started for warning in one["warnings"]]}


MOVE_DEADLINE_S = MEMORY_DEADLINE_S + 600.0  # engines that do not answer in time are ended then


class GpuTurns:
    """The turns of one run.

    Args:
        args: reads `colocate`, `accelerator`, `offload_train`, `offload_rollout`, `release_train`.
        manager: the rollout manager's actor.
    """

    def __init__(self, args: Args, manager: Any) -> None:
        self.trainers_leave: bool = args.offload_train or args.release_train
        self.engines_leave: bool = args.offload_rollout and args.colocate
        self.share_gpus: bool = args.colocate and args.accelerator != "cpu"
        self._leave_to_engines: bool = args.colocate or args.release_train
        self._manager = manager
        self._awake: RayTrainGroup | None = None
        self._engines_have: set[str] = {"weights", "kv"}
        self._metrics: dict[str, float] = defaultdict(float)

    def start_trainers(self, groups: Sequence[RayTrainGroup], beside: Beside | None = None) -> list[dict[str, Any]]:
        """Start trainer groups side by side, or in turn where they leave the GPU to each other; the last one stays.

        Engines are to be running when they release memory: trainers are built in what that leaves free.

        Args:
            groups: which.
            beside: what else is under way, and ends the waits for them when it fails.

        Returns:
            what `RayTrainGroup.wait_started` does, of each.
        """
        self._engines_out()
        if not self.trainers_leave:
            for group in groups:
                group.start(beside)
            return [group.wait_started(beside) for group in groups]
        found = []
        for group in groups:
            self._trainers_out()
            group.start(beside)
            found.append(group.wait_started(beside))
            self._awake = group
        return found

    def trainers_are_lost(self) -> None:
        """Their memory is free; the engines have what they had."""
        self._awake = None

    def to_trainer(self, group: RayTrainGroup) -> None:
        """Let this group compute."""
        self._engines_out()
        if self.trainers_leave and self._awake is not group:
            self._trainers_out()
            self._count(group.wake_up(), group)
            self._awake = group

    def to_weight_sync(self, actor: RayTrainGroup) -> None:
        """Let the actor send its weights to the engines."""
        self.to_trainer(actor)
        self._engines_in("weights")

    def to_engines(self) -> None:
        """Let the engines generate."""
        if self._leave_to_engines:
            self._trainers_out()
        self._engines_in("weights")
        self._engines_in("kv")

    def take_metrics(self) -> dict[str, float]:
        """Times and memory of the moves since the last call; times of several moves are summed."""
        taken, self._metrics = self._metrics, defaultdict(float)
        return dict(taken)

    def _trainers_out(self) -> None:
        if self.trainers_leave and self._awake is not None:
            self._count(self._awake.sleep(), self._awake)
            self._awake = None

    def _engines_out(self) -> None:
        if self.engines_leave and "kv" in self._engines_have:
            start = time.monotonic()
            get(self._manager.offload.remote(), "the engines to release their GPU memory", MOVE_DEADLINE_S)
            self._engines_have.clear()
            self._metrics["perf/engine_release_time"] += time.monotonic() - start

    def _engines_in(self, kind: str) -> None:
        if self.engines_leave and kind not in self._engines_have:
            start = time.monotonic()
            onload = {"weights": self._manager.onload_weights, "kv": self._manager.onload_kv}[kind]
            get(onload.remote(), f"the engines to take GPU memory for {kind}", MOVE_DEADLINE_S)
            self._engines_have.add(kind)
            self._metrics["perf/engine_resume_time"] += time.monotonic() - start

    def _count(self, metrics: dict[str, float], group: RayTrainGroup) -> None:
        """Add a move's metrics; those of the critic have its name, and its memory is left out."""
        if group.role == "critic":
            times = {name: value for name, value in metrics.items() if name.startswith("perf/")}
            metrics = {name.replace("perf/", "perf/critic_"): value for name, value in times.items()}
        for name, value in metrics.items():
            self._metrics[name] = value + (self._metrics[name] if name.startswith("perf/") else 0.0)
