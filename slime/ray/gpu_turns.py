"""Whose turn it is on the GPUs that several share: engines and trainers (--colocate), actor and critic.

    generating     engines have weights and KV cache; trainers sleep
    training       engines have released both; one trainer group is awake, the other (PPO) sleeps
    weight sync    the actor is awake, engines have room for weights but no KV cache: the trainer's live tensors are
                   what is sent, so both hold the weights for that moment

The driver says what is to come next; here it is known who is where, so only what has to move is moved. Where nobody
has to leave (GPUs of their own, the CPU, --no-offload-*) every verb does nothing. Each verb waits until memory is free
before it is taken by the next: a failure on the way ends the run with its error. (With --use-fault-tolerance the
rollout manager does without an engine that died while it had no memory.) How memory is released is the actors'
business; with --release-train trainers end in place of sleeping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from slime.config.args import Args
from slime.ray.actor_group import Beside, RayTrainGroup
from slime.ray.rollout.servers import MEMORY_DEADLINE_S
from slime.ray.utils import get

logger = logging.getLogger(__name__)

MOVE_DEADLINE_S = MEMORY_DEADLINE_S + 600.0  # engines that do not answer in time are ended then


class GpuTurns:
    """The turns of one run.

    Args:
        args: reads `colocate`, `offload_train`, `offload_rollout`, `release_train`.
        manager: the rollout manager's actor.
    """

    def __init__(self, args: Args, manager: Any) -> None:
        self.trainers_leave: bool = args.offload_train or args.release_train
        self.engines_leave: bool = args.offload_rollout and args.colocate
        self._leave_to_engines: bool = args.colocate or args.release_train
        self._manager = manager
        self._awake: RayTrainGroup | None = None
        self._engines_have: set[str] = {"weights", "kv"}
        self._metrics: dict[str, float] = {}

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
        taken, self._metrics = self._metrics, {}
        return taken

    def _trainers_out(self) -> None:
        if self.trainers_leave and self._awake is not None:
            self._count(self._awake.sleep(), self._awake)
            self._awake = None

    def _engines_out(self) -> None:
        if self.engines_leave and "kv" in self._engines_have:
            start = time.monotonic()
            get(self._manager.offload.remote(), "the engines to release their GPU memory", MOVE_DEADLINE_S)
            self._engines_have.clear()
            self._add("perf/engine_release_time", time.monotonic() - start)

    def _engines_in(self, kind: str) -> None:
        if self.engines_leave and kind not in self._engines_have:
            start = time.monotonic()
            onload = {"weights": self._manager.onload_weights, "kv": self._manager.onload_kv}[kind]
            get(onload.remote(), f"the engines to take GPU memory for {kind}", MOVE_DEADLINE_S)
            self._engines_have.add(kind)
            self._add("perf/engine_resume_time", time.monotonic() - start)

    def _count(self, metrics: dict[str, float], group: RayTrainGroup) -> None:
        """Add a move's metrics; those of the critic have its name, and its memory is not told."""
        if group.role == "critic":
            times = {name: value for name, value in metrics.items() if name.startswith("perf/")}
            metrics = {name.replace("perf/", "perf/critic_"): value for name, value in times.items()}
        for name, value in metrics.items():
            if name.startswith("perf/"):
                self._add(name, value)
            else:
                self._metrics[name] = value

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
