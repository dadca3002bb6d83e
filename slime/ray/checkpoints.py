"""The checkpoints of a run as its driver sees them: what is begun, what is complete, and what became of a full disk.

A checkpoint is the trainers' (the critic's first, for the actor's says which iterations are complete) and the data
source's state, which was asked for right behind the rollout. It decides nothing about when one is due, and knows no
file but that state's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ray

from slime.ray.actor_group import RayTrainGroup
from slime.ray.gpu_turns import GpuTurns
from slime.ray.utils import ActorFailure, get
from slime.utils.checkpoint_paths import latest_iteration, manifest_of_state, state_path

logger = logging.getLogger(__name__)

STATE_DEADLINE_S = 600.0


class Checkpoints:
    """Those of one run.

    Args:
        save: directory of --save, None where only HF exports are written.
        is_async: they are written while training goes on (--async-save).
        exports: HF models are exported (--save-hf).
        needs_each: the run cannot go on without one that was to be written (--release-train).
        log: takes a record of metrics.

    Attributes:
        has_saved: a checkpoint of this run is complete.
    """

    def __init__(
        self,
        save: str | None,
        *,
        is_async: bool,
        exports: bool,
        needs_each: bool,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        self._save = save
        self._needs_each = needs_each
        self._is_async = is_async and bool(save)
        self._exports = exports
        self._log = log
        self._states: dict[int, ray.ObjectRef] = {}
        self._begun: int | None = None
        self._state_of_copy: int | None = None
        self._has_saved = False
        self._newest_at_start = self._newest()

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint of this run is complete.

        Of one whose writer was lost right behind it nobody was told: the tracker alone says so.
        """
        return self._has_saved or self._newest() != self._newest_at_start

    def _newest(self) -> int | None:
        return None if self._save is None else latest_iteration(self._save)

    def keep_state(self, rollout_id: int, saved: ray.ObjectRef) -> None:
        """The data source's state of a rollout is being written."""
        self._states[rollout_id] = saved

    def forget_state(self, rollout_id: int) -> None:
        """Remove the data source's state of a rollout that could have become the last, and did not."""
        if rollout_id in self._states:
            self._await_state(rollout_id)
            self._remove_state(rollout_id)

    def has_state_for_copy(self, rollout_id: int) -> bool:
        """Whether the trainers' states may be copied to memory behind this rollout: not without the data source's."""
        if why_not := self._await_state(rollout_id):
            logger.error("the states of rollout %d are not copied: %s; those before are kept", rollout_id, why_not)
        return not why_not

    def keep_state_of_copy(self, rollout_id: int) -> None:
        """Keep the data source's state of a rollout behind which the trainers' states were copied to memory, in the
        place of the one before."""
        if self._state_of_copy != rollout_id:
            self.forget_state_of_copy()
        self._state_of_copy = rollout_id

    def forget_state_of_copy(self) -> None:
        """Nobody will go on from the copies any more."""
        if self._state_of_copy is not None:
            self._remove_state(self._state_of_copy)
        self._state_of_copy = None

    def _remove_state(self, rollout_id: int) -> None:
        if self._save:
            path = state_path(self._save, rollout_id)
            for file in (path, manifest_of_state(path)):
                file.unlink(missing_ok=True)

    def forget_what_was_begun(self) -> None:
        """Those who were writing are gone."""
        self._states.clear()
        self._begun = None

    def save(self, rollout_id: int, groups: Sequence[RayTrainGroup], turns: GpuTurns, *, is_last: bool) -> None:
        """Write the checkpoint of a rollout, or begin to.

        Args:
            rollout_id: which.
            groups: the trainers, the actor's last.
            turns: gives each the GPU.
            is_last: no other rollout follows: what is begun is completed.

        Raises:
            ActorFailure: it does not fit on the disk, and it is the last, or none can be missing.
        """
        self.finish(groups, turns)
        if self._state_of_copy == rollout_id:
            self._state_of_copy = None  # it is the checkpoint's from now on
        why_not = self._await_state(rollout_id)
        for group in groups:
            turns.to_trainer(group)
            why_not = why_not or group.save_model(rollout_id)
        if self._is_async and not why_not:
            self._begun = rollout_id
            if is_last:
                self.finish(groups, turns, is_last=True)
        else:
            self._note(rollout_id, why_not, is_last=is_last)
        if self._exports:
            self._note_export(why_not or groups[-1].export_problem())  # the export comes last

    def finish(
        self, groups: Sequence[RayTrainGroup], turns: GpuTurns, *, if_written: bool = False, is_last: bool = False
    ) -> None:
        """Complete the checkpoint that is written while training goes on, if there is one.

        Args:
            groups: see `save`. turns: see `save`. is_last: see `save`.
            if_written: wait for nothing.
        """
        if self._begun is None or (if_written and not all(group.save_is_written() for group in groups)):
            return
        (rollout_id, self._begun), why_not = (self._begun, None), None
        for group in groups:
            turns.to_trainer(group)
            why_not = why_not or group.finish_save()
        self._note(rollout_id, why_not, is_last=is_last)

    def _await_state(self, rollout_id: int) -> str | None:
        """Wait for the data source's state of a rollout, if it is being written; returns why it was not, if its disk
        is full."""
        saved = self._states.pop(rollout_id, None)
        if saved is None:
            return None
        why_not: str | None = get(saved, f"the data source's state of rollout {rollout_id}", STATE_DEADLINE_S)
        return why_not

    def _note(self, rollout_id: int, why_not: str | None, *, is_last: bool) -> None:
        """A checkpoint that was not written leaves the one before; after the last rollout there is no other chance."""
        self._log({"perf/checkpoint_not_written": float(bool(why_not))})
        if not why_not:
            self._has_saved = self._has_saved or bool(self._save)
            return
        what = f"the checkpoint of rollout {rollout_id} was not written: {why_not}"
        if is_last or self._needs_each:
            raise ActorFailure(f"{what}; free some room and start again with --load {self._save}.")
        logger.error("%s; the one before is kept, and the run goes on", what)

    def _note_export(self, why_not: str | None) -> None:
        self._log({"perf/hf_export_not_written": float(bool(why_not))})
        if why_not:
            logger.error("the HF export (--save-hf) was not written, the run goes on: %s", why_not)
