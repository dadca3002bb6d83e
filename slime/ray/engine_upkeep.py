"""The engines of a run as its driver keeps them: replaced where they are lost, and in step with the trainer.

Where a model has lost all of its engines, its requests wait in the rollout manager. Whoever waits for what is made of
their answers does so with `wait`, which meanwhile has others started and gives them the weights of the lost ones.

Wait graph of `wait`: it waits for the rollout manager; the rollout that is waited for waits for the new engines, and
they, for their weights, for the trainers, which do nothing else while the driver waits.
"""

from __future__ import annotations

import logging
from typing import Any

import ray

from slime.observability.phases import Phases
from slime.ray.actor_group import RayTrainGroup
from slime.ray.checkpoints import STATE_DEADLINE_S
from slime.ray.run_parts import WORK_DEADLINE_S, RunParts
from slime.ray.utils import ActorFailure, ActorLost, get

logger = logging.getLogger(__name__)

# Each start of an engine has a deadline of its own, and --max-engine-restarts-per-hour says how many there may be.
REPLACE_DEADLINE_S = 24 * 3600.0


class EngineUpkeep:
    """What the driver does about the engines of one run.

    Args:
        parts: of the run.
        phases: of the run; while engines are started it is in phase "start".
        is_on: lost engines are replaced (--use-fault-tolerance).
        may_grow: engines may join in the middle of a rollout (--elastic-rollout).

    Attributes:
        version: of the last weight sync; 0 before the first.
        sends_weights: whether engines take the trainer's weights.
        is_ahead: the trainer's weights are newer than those of the last sync.
    """

    def __init__(self, parts: RunParts, phases: Phases, *, is_on: bool, may_grow: bool = False) -> None:
        self._parts = parts
        self._phases = phases
        self._is_on = is_on
        self._engine_count = 0
        self._may_grow = is_on and may_grow
        self.version = 0
        self.sends_weights = False
        self.is_ahead = True

    def replace(self) -> None:
        """Start engines in place of lost ones; those that take the trainer's weights serve after the next sync."""
        if not self._is_on:
            return
        self._ask("replace_engines", "engines in place of lost ones", deadline_s=REPLACE_DEADLINE_S)
        if not self.sends_weights:  # they have the weights that they are to have
            self.register()

    def handles(self) -> tuple[list[Any], list[int]]:
        """The engines that take the trainer's weights, and the GPUs of each."""
        return self._ask("get_updatable_engines", "the engine handles")

    def connect(self) -> bool:
        """Have new trainers know the engines, and send their weights there next; whether any engine takes them."""
        if self._lacks_engines():
            self._start_where_there_is_room()
            self._parts.turns.to_trainer(self._trainers)
        engines, sizes = self.handles()
        self.sends_weights, self.is_ahead = bool(engines), True
        if engines:
            self._trainers.connect_rollout_engines(engines, sizes, weight_version=self.version)
        return self.sends_weights

    def register(self) -> None:
        """Let engines serve that have their weights, and watch over them."""
        if self._is_on:
            self._ask("register_engines", "the router to take new engines")

    def wait(self, ref: ray.ObjectRef | list[ray.ObjectRef], what: str) -> Any:
        """Wait for what is made of the engines' answers; meanwhile a model that has no engine any more gets others."""
        return get(ref, what, WORK_DEADLINE_S, meanwhile=self.look_after if self._is_on else None)

    def look_after(self) -> None:
        """Have every model served, and let engines in that join."""
        self.serve_all()
        self.welcome()

    def welcome(self) -> None:
        """Give engines that have joined the weights of the last sync at once, and let them serve.

        Where the trainer has newer ones, or has left its GPU, they get theirs in the next sync.
        """
        if not self._may_grow or not self.sends_weights or self.is_ahead or self._parts.turns.trainers_leave:
            return
        engines, sizes = self._ask("admit_engines", "the engines that join")
        if not engines:
            return
        self._engine_count = -1  # the next sync goes to all of them again
        try:
            self._trainers.connect_rollout_engines(engines, sizes, weight_version=self.version - 1)
            self._trainers.update_weights()
        except ActorLost:
            raise
        except ActorFailure as error:
            self._ask("engines_failed", "the watch over the engines", range(len(engines)), str(error))
        self.register()

    def serve_all(self, *, with_weights: bool = True) -> None:
        """Have every model served again that has lost all of its engines.

        Args:
            with_weights: of the trainers; not while these are lost, when what engines make is thrown away.

        Raises:
            ActorFailure: no engine can be started.
        """
        if not self._lacks_engines():
            return
        with self._phases.enter("start"):
            logger.warning("a model has lost its engines: the rollout waits until others are started in their place")
            self._start_where_there_is_room()
            if not with_weights:
                self.register()
            elif self.sends_weights and self._lacks_engines():  # other models' engines serve when they have started
                self._send_again()

    def _lacks_engines(self) -> bool:
        return self._is_on and self._ask("lacks_engines", "the rollout manager")

    def _start_where_there_is_room(self) -> None:
        self._parts.turns.to_engines()  # the new ones begin like these, which may have released their memory
        self.replace()

    def _send_again(self) -> None:
        """Give new engines, in the middle of a rollout, the weights that there are, as the version of the lost ones.

        Where the trainer has trained since the last sync (train_async.py), these are newer than their version says:
        a version more would count as a sync of the schedule, and let rollouts begin too early.
        """
        if self.is_ahead:
            logger.warning(
                "the new engines get weights that were trained on since the last sync: tokens of this rollout that "
                "they make are newer than their weight version %d",
                self.version,
            )
        self._ask("hold_requests", "the rollout manager")  # of other models, too: they release memory for the trainer
        self.send_weights(self.version)
        self._parts.turns.to_engines()
        self.register()

    def send_weights(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the engines that are there, as this version; returns its metrics.

        Once more where one is lost meanwhile (--use-fault-tolerance), for until then the others wait, paused, with a
        part of the new weights. Where none is left, to those that are started in their place.
        """
        while True:
            self._parts.turns.to_weight_sync(self._trainers)
            count = self._count()
            try:
                if not self._follow_engines(count, version - 1):
                    self._start_where_there_is_room()
                    continue
                metrics = self._trainers.update_weights()
            except ActorLost:
                raise
            except ActorFailure as error:
                if not self._is_lost_meanwhile(error, count):
                    self._raise_end_of_engine(error)
                    raise
                logger.warning("the weights are sent again, without engines that were lost meanwhile: %s", error)
            else:
                self.version, self.is_ahead = version, False
                return metrics

    def _count(self) -> int:
        """Look at the engines a last time before a sync; returns a number that changes with every loss."""
        if not self._is_on:
            return self._engine_count
        return self._ask("pause_watch", "the watch over the engines")

    def _is_lost_meanwhile(self, error: ActorFailure, count: int) -> bool:
        silent = getattr(error.cause, "silent", ())
        if not self._is_on or (getattr(error.cause, "is_final", False) and not silent):
            return False  # nothing was lost that sending again would help
        return bool(self._ask("engines_failed", "the watch over the engines", silent, str(error)) != count)

    def _raise_end_of_engine(self, error: ActorFailure) -> None:
        """Raise why an engine has ended, where a sync failed for that; with fault tolerance the watch has said so."""
        if isinstance(error, ActorLost) or self._is_on:
            return
        if ended := self._ask("ended_engines", "the state of the engines"):
            raise ActorFailure(f"{ended[0]}; noticed by a weight sync: {error}", error.details, error.cause) from error

    def _follow_engines(self, count: int, version: int) -> bool:
        """Have the trainer send to the engines that are there, where some were lost or replaced, or the trainer is
        another one (--release-train); whether there are any."""
        if count == self._engine_count and self._trainers.knows_engines:
            return True
        engines, sizes = self.handles()
        if not engines:
            return False
        self._trainers.connect_rollout_engines(engines, sizes, weight_version=version)
        self._engine_count = count
        return True

    def _ask(self, verb: str, what: str, *values: Any, deadline_s: float = STATE_DEADLINE_S) -> Any:
        return get(getattr(self._parts.manager, verb).remote(*values), what, deadline_s)

    @property
    def _trainers(self) -> RayTrainGroup:
        assert self._parts.actor is not None, "only a run with trainers sends weights"
        return self._parts.actor
