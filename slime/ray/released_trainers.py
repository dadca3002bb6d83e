"""Trainers that end while engines generate, and begin again from the checkpoint (--release-train).

To the driver they are a group that sleeps and wakes up. Asleep there are only fresh processes, which import what a
trainer is made of and take no GPU; awake, they have loaded what was saved last. Before the first save that is what the
run began with. The engines hear of no change: versions of the weights go on.

It does not know whose turn it is, nor that everything is saved before a sleep; the flags are checked for that.
"""

from __future__ import annotations

import time
from typing import Any

from slime.config.args import Args
from slime.ray.actor_group import Beside, RayTrainGroup
from slime.ray.placement_group import Placement
from slime.ray.resume_point import resumed
from slime.ray.train_actor import TrainRayActor
from slime.ray.utils import ActorFailure


class ReleasedTrainGroup(RayTrainGroup):
    """The ranks of the actor.

    Args:
        args: the run's flags.
        placement: where the ranks sit.
        actor_cls: the actor class; another one with the same methods may be given.
    """

    def __init__(self, args: Args, placement: Placement, *, actor_cls: type = TrainRayActor) -> None:
        super().__init__(args, placement, actor_cls=actor_cls)
        self._is_awake = False
        self._is_connected = False
        self._engines: tuple[list[Any], list[int]] | None = None
        self._weight_version = 0

    def wait_started(self, beside: Beside | None = None) -> dict[str, Any]:
        """As of `RayTrainGroup`."""
        started = super().wait_started(beside)
        self._is_awake = True
        return started

    def save_model(self, rollout_id: int) -> str | None:
        """Write the checkpoint that the next trainers begin from.

        Raises:
            ActorFailure: its disk is full.
        """
        if why := super().save_model(rollout_id):
            raise ActorFailure(f"--release-train cannot go on without the checkpoint of rollout {rollout_id}: {why}.")
        self.args = resumed(self.args)
        return None

    def connect_rollout_engines(self, engines: list[Any], engine_sizes: list[int], *, weight_version: int = 0) -> None:
        """As of `RayTrainGroup`; the next trainers get the same engines."""
        self._engines, self._weight_version = (engines, engine_sizes), weight_version
        self._is_connected = True
        super().connect_rollout_engines(engines, engine_sizes, weight_version=weight_version)

    def update_weights(self) -> dict[str, float]:
        """As of `RayTrainGroup`."""
        if not self._is_connected and self._engines is not None:  # not before: they may be others by now
            self.connect_rollout_engines(*self._engines, weight_version=self._weight_version)
        metrics = super().update_weights()
        self._weight_version += 1
        return metrics

    def sleep(self) -> dict[str, float]:
        """End the trainers, and have the next ones import what they need meanwhile."""
        start = time.monotonic()
        self.shutdown()
        self._actors = self._create_actors()
        self.load()
        return {"perf/sleep_time": time.monotonic() - start}

    def wake_up(self) -> dict[str, float]:
        """Build the next trainers."""
        start = time.monotonic()
        self.start()
        self.wait_started()
        self._is_connected = False
        return {"perf/wake_up_time": time.monotonic() - start}

    def shutdown(self, *, graceful: bool = True) -> None:
        """As of `RayTrainGroup`; trainers that were not built have nothing to end."""
        super().shutdown(graceful=graceful and self._is_awake)
        self._is_awake = False
