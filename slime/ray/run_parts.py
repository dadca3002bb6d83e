"""What a training run is made of: the rollout manager with its engines, the trainers, and the turns that these take on
GPUs. They are started, started again after a loss, and ended here.

What is done with them, and in which order, knows `TrainingRun`; this knows no rollout and no weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slime.config.args import Args, with_run_keys
from slime.config.rules.batch import check_schedule_length, check_warmup
from slime.ray.actor_group import RayTrainGroup
from slime.ray.checkpoints import STATE_DEADLINE_S
from slime.ray.elastic import usable
from slime.ray.gpu_turns import GpuTurns
from slime.ray.placement_group import connect_ray, create_placement
from slime.ray.released_trainers import ReleasedTrainGroup
from slime.ray.resume_point import resumed, settle_checkpoint
from slime.ray.rollout.manager import CONCURRENCY_GROUPS, LOAD_DEADLINE_S, RolloutManager
from slime.ray.start import start_side_by_side
from slime.ray.utils import ActorFailure, ActorLost, actor_env, get, on_this_node
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)

WORK_DEADLINE_S = 24 * 3600.0  # generation has no bound of its own; each request inside it has one
DISPOSE_DEADLINE_S = 60.0


class RunParts:
    """The parts of one run.

    Args:
        args: the parsed flags.

    Attributes:
        args: the flags with which the run goes on: with its keys, and after a loss with what it resumes from.
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
        """Begin the rollout manager's process, which starts engines when it is told to."""
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
        """Start engines and trainers beside each other; returns what the trainers say (`start_side_by_side`).

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
        problems = [*check_schedule_length(self.args), *check_warmup(self.args)]
        if problems and not self.args.debug_rollout_only:
            raise UsageError(problems)

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
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the boundary: one part that does not end must not keep the others
        logger.warning("ending %s: %s", what, error)
