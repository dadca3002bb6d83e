"""The checkpoints of a run as its driver sees them: which one it resumes from, what is begun, and what is complete.

A checkpoint is the trainers' (the critic's first, for the actor's says which iterations are complete) and the data
source's state, which was asked for right after the rollout. `TrainingRun` decides when one is due.

A run resumes from the newest iteration of --load of which all files are what was written: it may have been cut while
it saved, and a disk may lose what it was given. What is wrong with an iteration is reported, and the one before is
taken; an iteration that --ckpt-step names is not exchanged for another. Actor, critic and data source have to resume
from the same one, so it is chosen before any of them is started. Checkpoints without a manifest (Megatron's own)
cannot be verified.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.checkpoints.paths import (
    MANIFEST_FILE,
    MODEL_SHAPE_FILE,
    STATE_MANIFEST,
    TRACKER_FILE,
    Depth,
    classify_checkpoint,
    iteration_dir,
    latest_iteration,
    manifest_of_state,
    read_tracker,
    state_path,
    what_is_wrong,
)
from slime.checkpoints.remote import UPLOAD_DEADLINE_S, Uploads
from slime.config.args import Args
from slime.config.roles import parse_megatron_role_args
from slime.config.rules.run_dirs import NEVER
from slime.ray.utils import ActorFailure, get
from slime.utils.errors import UsageError

if TYPE_CHECKING:
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.run_parts import GpuTurns

logger = logging.getLogger(__name__)

STATE_DEADLINE_S = 600.0


class Checkpoints:
    """Those of one run.

    Args:
        save: directory of --save, None where only HF exports are written.
        is_async: they are written while training continues (--async-save).
        exports: HF models are exported (--save-hf).
        uploads: sends what is complete to URLs.
        needs_each: the run cannot continue without one that was to be written (--release-train).
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
        uploads: Uploads,
        needs_each: bool,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        self._save = save
        self._needs_each = needs_each
        self._is_async = is_async and bool(save)
        self._exports = exports
        self._uploads = uploads
        self._log = log
        self._states: dict[int, ray.ObjectRef] = {}
        self._begun: int | None = None
        self._state_of_copy: int | None = None
        self._has_saved = False
        self._newest_at_start = self._newest()

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint of this run is complete.

        Of one whose writer was lost right after it nobody was told: the tracker alone says so.
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
        """Whether the trainers' states may be copied to memory after this rollout: not without the data source's."""
        if why_not := self._await_state(rollout_id):
            logger.error("the states of rollout %d are not copied: %s; those before are kept", rollout_id, why_not)
        return not why_not

    def keep_state_of_copy(self, rollout_id: int) -> None:
        """Keep the data source's state of a rollout after which the trainers' states were copied to memory, in the
        place of the one before."""
        if self._state_of_copy != rollout_id:
            self.forget_state_of_copy()
        self._state_of_copy = rollout_id

    def forget_state_of_copy(self) -> None:
        """Nobody will resume from the copies any more."""
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
        self._await_uploads(is_last=False)  # what is being sent must neither be replaced nor deleted
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
            self._note_export(export_problem := why_not or groups[-1].export_problem())  # the export comes last
        is_complete = not why_not and not self._is_async
        self._uploads.begin(rollout_id, checkpoint=is_complete, export=self._exports and not export_problem)
        if is_last:
            self._await_uploads(is_last=True)

    def finish(
        self, groups: Sequence[RayTrainGroup], turns: GpuTurns, *, if_written: bool = False, is_last: bool = False
    ) -> None:
        """Complete the checkpoint that is written while training continues, if there is one.

        Args:
            groups: see `save`. turns: see `save`. is_last: see `save`.
            if_written: wait for nothing.
        """
        if self._begun is None or (if_written and not self._can_finish(groups)):
            return
        self._await_uploads(is_last=False)
        (rollout_id, self._begun), why_not = (self._begun, None), None
        for group in groups:
            turns.to_trainer(group)
            why_not = why_not or group.finish_save()
        self._note(rollout_id, why_not, is_last=is_last)
        self._uploads.begin(rollout_id, checkpoint=not why_not, export=False)

    def _can_finish(self, groups: Sequence[RayTrainGroup]) -> bool:
        """Whether `finish` would wait for nothing."""
        return not self._uploads.is_busy and all(group.save_is_written() for group in groups)

    def _await_uploads(self, *, is_last: bool, deadline_s: float = UPLOAD_DEADLINE_S) -> None:
        """Wait until everything is sent; what could not be is sent with the next, unless there is none."""
        if not (why_not := self._uploads.wait(deadline_s)):
            return
        if is_last:
            raise ActorFailure(
                f"the last checkpoint or export was not sent ({why_not}); its files are here, complete."
            )
        logger.error("a checkpoint or export was not sent, the run goes on: %s", why_not)

    def end_uploads(self) -> None:
        """Wait for what a run that ends has on its way."""
        self._await_uploads(is_last=False, deadline_s=STATE_DEADLINE_S)

    def _await_state(self, rollout_id: int) -> str | None:
        """Wait for the data source's state of a rollout, if it is being written; returns why it was not, if its disk
        is full."""
        saved = self._states.pop(rollout_id, None)
        if saved is None:
            return None
        return get(saved, f"the data source's state of rollout {rollout_id}", STATE_DEADLINE_S)

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


def resumed(args: Args) -> Any:
    """The flags of a run that resumes from the last checkpoint of its own."""
    values = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
    return args.replace(load=args.save, ckpt_step=None, start_rollout_id=None, **values)


def settle_checkpoint(args: Args) -> Any:
    """The flags with the iteration of --load that can be loaded as `ckpt_step`, where its newest one cannot.

    Args:
        args: reads `load`, `ckpt_step`, `ref_load`, `ref_ckpt_step`, `opd_teacher_load`, `opd_teacher_ckpt_step`,
            `verify_checkpoint`, `save`, `resume`, `finetune`, `start_rollout_id`, `eval_only`,
            `load_debug_rollout_data`, and where the critic's checkpoints are.

    Raises:
        UsageError: what is to be loaded is not whole, and nothing else may be taken in its place.
    """
    if args.debug_rollout_only or args.verify_checkpoint == "none":
        return args
    if args.save and args.resume != NEVER:
        _refuse_lost_tracker(Path(args.save))
    begin, depth = time.monotonic(), args.verify_checkpoint
    for flag, path, step in (
        ("--ref-load", args.ref_load, args.ref_ckpt_step),
        ("--opd-teacher-load", args.opd_teacher_load, args.opd_teacher_ckpt_step),
    ):
        if path is not None and path != args.load and classify_checkpoint(path) == "megatron":
            wanted = read_tracker(path) if step is None else step
            if problem := _problem([Path(path)], wanted, depth, with_state=False):
                raise UsageError(f"{flag} {path}: {problem}; give a checkpoint that is whole.")
    if classify_checkpoint(args.load) != "megatron":
        return args
    settled = _settle_load(args, depth)
    seconds = time.monotonic() - begin
    logger.info("checkpoint in %s is whole (--verify-checkpoint %s, %.1f s)", args.load, depth, seconds)
    return settled


def _refuse_lost_tracker(root: Path) -> None:
    """A run that has saved and does not know it would begin anew, and write over what is there."""
    there = sorted(path.parent.name for path in root.glob(f"iter_*/{MANIFEST_FILE}"))
    if there and not (root / TRACKER_FILE).exists():
        raise UsageError(
            f"--save {root} holds {there[-1]}, but no {TRACKER_FILE} that says so: write the iteration's number into "
            "that file to go on from it, give --fresh-output to begin anew, or name another directory."
        )


def _settle_load(args: Args, depth: Depth) -> Any:
    root = Path(args.load)
    newest: Any = read_tracker(root) if args.ckpt_step is None else args.ckpt_step
    roots = [root]
    critic = parse_megatron_role_args(args, "critic") if args.use_critic else None
    if critic is not None and classify_checkpoint(critic.load) == "megatron" and critic.load != args.load:
        roots.append(Path(critic.load))
    problem = _problem(roots, newest, depth, with_state=_takes_state(args, newest))
    if problem is None:
        return args
    older = (
        step for step in _older(root, newest) if not _problem(roots, step, depth, with_state=_takes_state(args, step))
    )
    whole = next(older, None)
    if whole is None:
        raise UsageError(f"--load {root}: {problem}; it holds no other iteration that is whole.")
    if args.ckpt_step is not None:
        raise UsageError(f"--ckpt-step {newest}: {problem}; the newest whole one before it is --ckpt-step {whole}.")
    logger.error("--load %s: iteration %s cannot be loaded: %s", root, newest, problem)
    logger.error("the run goes on from iteration %d: what was trained since then is trained anew", whole)
    return args.replace(ckpt_step=whole)


def _takes_state(args: Args, step: Any) -> bool:
    """Whether the data source resumes from its state after an iteration: not where the run begins elsewhere, nor where
    nothing is drawn from it."""
    if args.finetune or args.eval_only or args.load_debug_rollout_data is not None or not str(step).isdigit():
        return False
    return args.start_rollout_id is None or int(args.start_rollout_id) == int(step) + 1


def _older(root: Path, newest: Any) -> list[int]:
    """Iterations before this one, the newest first; none before a release, which belongs to no iteration."""
    if not str(newest).isdigit():
        return []
    names = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*")]
    return sorted((step for name in names if name and (step := int(name[1])) < int(newest)), reverse=True)


def _problem(roots: Sequence[Path], step: Any, depth: Depth, *, with_state: bool) -> str | None:
    """What is wrong with an iteration of all roots, or with the data source's state after it.

    The iteration of the first root says which state belongs to it. None does where a data source of the user's own
    wrote what it likes, or where nothing was drawn from one.
    """
    for directory in (iteration_dir(root, step) for root in roots):
        if not directory.is_dir():
            return f"{directory} does not exist"
        if not (directory / MODEL_SHAPE_FILE).is_file() and not (directory / MANIFEST_FILE).is_file():
            logger.info("%s is not slime's and has no %s: it is not verified", directory, MANIFEST_FILE)
        elif problem := what_is_wrong(directory / MANIFEST_FILE, depth):
            return problem
    of_state = iteration_dir(roots[0], step) / STATE_MANIFEST
    if not with_state or not of_state.exists():
        return None
    if problem := what_is_wrong(of_state, depth):
        more = "(the data source's state: where it is gone, --verify-checkpoint none begins with the first prompt)"
        return f"{problem} {more}"
    return None
