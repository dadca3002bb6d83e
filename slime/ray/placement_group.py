"""The names that drivers of upstream use, as thin functions over `TrainingRun` (docs/own_driver.md).

    pgs = create_placement_groups(args)
    rollout_manager, num_rollout_per_epoch = create_rollout_manager(args, pgs["rollout"])
    actor_model, critic_model = create_training_models(args, pgs, rollout_manager)

Where they differ from upstream:

1. `create_placement_groups` starts everything side by side; the other two only hand out what is there. The run ends
   with the process.
2. The run itself decides whose turn it is on a shared GPU, so `offload`, `onload` and their kind return at once.
3. After the start the engines have the trainer's weights: `update_weights` sends what was trained since the last sync.
4. `async_train` has trained when it returns, actor and critic together.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import ray

from slime.config.args import Args
from slime.observability.phases import phase
from slime.ray.run import PendingRollout, TrainingRun
from slime.utils.errors import UsageError


class DriverRun(TrainingRun):
    """A run whose schedule is a driver with upstream's names; it is the driver's `actor_model` and `critic_model`."""

    def __init__(self, args: Args) -> None:
        super().__init__(args, sync_interval=args.update_weights_interval)
        self._begun: dict[int, PendingRollout] = {}
        self._has_news = False  # weights that the engines do not have
        self._saved: int | None = None

    def begin(self, rollout_id: int) -> ray.ObjectRef:
        """Begin a rollout; the reference becomes the share of each data-parallel rank."""
        self._begun[rollout_id] = self.start_generate(rollout_id)
        return self._begun[rollout_id].train_data[0]

    def begin_eval(self, rollout_id: int) -> ray.ObjectRef:
        """Begin an evaluation, which is logged at the number of rollouts that were trained on."""
        self._start_eval(rollout_id, step=max(self.plan.start_rollout_id, self._trained.stop))
        assert self._evaluation is not None
        return self._evaluation[1]

    def async_train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> list[Any]:
        """Train actor and critic on the shares, once: the second of the two models asks for what is done.

        Args:
            rollout_id: which.
            rollout_data_ref: what `generate` gave.
            external_data: not read; upstream's drivers hand the critic's values over here, the run does it itself.

        Raises:
            ValueError: no rollout of this id was begun.
        """
        if rollout_id in self._trained:
            return []
        if rollout_id not in self._begun:
            raise ValueError(f"async_train({rollout_id}): call rollout_manager.generate.remote({rollout_id}) first")
        pending = self.wait_generated(self._begun.pop(rollout_id))
        given = [ray.put(rollout_data_ref), pending.train_data[1]]
        self.train_step(rollout_id, dataclasses.replace(pending, train_data=given))
        self._has_news = True
        return []

    def update_weights(self) -> None:
        """Send the weights, where the engines do not have them, once no request is in flight."""
        if self._has_news:
            self.finish_eval()
            for pending in () if self.args.update_weights_in_flight else self._begun.values():
                self.drain(pending)
            self.sync_weights()
            self._has_news = False

    @phase("save")
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of actor, critic and data source, once.

        Args:
            rollout_id: which.
            force_sync: with --async-save, return when it is complete.

        Raises:
            UsageError: there is no --save, nor --save-hf.
        """
        if not (self.args.save or self.args.save_hf):
            raise UsageError("save_model: give --save, or --save-hf, which say where to")
        if rollout_id == self._saved:
            if force_sync:
                self._checkpoints.finish(self.parts.groups, self.turns)
            return
        if self.args.save and not self._save_is_due(rollout_id):  # where the flags say so, it was kept in `begin`
            self._checkpoints.keep_state(rollout_id, self._manager.save.remote(rollout_id))
        self._save(rollout_id)
        self._saved = rollout_id
        if force_sync:
            self._checkpoints.finish(self.parts.groups, self.turns)

    def offload(self) -> None:
        """Nothing: the run moves trainers out of the engines' way itself."""

    onload = clear_memory = offload

    def dispose(self) -> ray.ObjectRef:
        """Complete what is under way; the run itself ends with the process."""
        self.finish_eval()
        self._checkpoints.finish(self.parts.groups, self.turns, is_last=True)
        return ray.put(None)


class RolloutHandle:
    """The `rollout_manager` of a driver. Methods that are not here are those of slime's `RolloutManager`."""

    def __init__(self, run: DriverRun) -> None:
        done = dict.fromkeys(("offload", "onload", "onload_weights", "onload_kv"), lambda *_, **__: ray.put(None))
        own = {"generate": run.begin, "eval": run.begin_eval, "dispose": run.dispose, **done}
        vars(self).update({name: SimpleNamespace(remote=call) for name, call in own.items()}, _manager=run._manager)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def create_placement_groups(args: Args) -> dict[str, DriverRun]:
    """Start the run of these flags, and end it with this process; sets `args.start_rollout_id` and `.num_rollout`.

    Returns:
        the run, under the names "actor", "critic" and "rollout".
    """
    started = DriverRun(args)
    started.__enter__()
    # `last_value` is set where an exception ends the program
    atexit.register(lambda: started.finish(failed=hasattr(sys, "last_value")))
    # `args` is frozen, and a driver of upstream's loops over these two
    vars(args).update(start_rollout_id=started.plan.start_rollout_id, num_rollout=started.plan.num_rollout)
    return dict.fromkeys(("actor", "critic", "rollout"), started)


def create_rollout_manager(args: Args, pg: DriverRun) -> tuple[RolloutHandle, int]:
    """Return the rollout manager of a run, and how many rollouts are an epoch."""
    return RolloutHandle(pg), pg.plan.num_rollout_per_epoch


def create_training_models(
    args: Args, pgs: dict[str, DriverRun], rollout_manager: RolloutHandle
) -> tuple[DriverRun, DriverRun | None]:
    """Return the actor's model of a run, and the critic's (None without one)."""
    return pgs["actor"], pgs["critic"] if args.use_critic else None
