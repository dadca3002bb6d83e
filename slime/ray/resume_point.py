"""Which iteration of --load a run goes on from: the newest of which all files are what was written.

A run may have been cut while it saved, and a disk may lose what it was given. What is wrong with an iteration is said,
and the one before is taken; an iteration that --ckpt-step names is not exchanged for another. Actor, critic and data
source have to go on from the same one, so it is chosen here, before any of them is started. Checkpoints without a
manifest (Megatron's own) cannot be looked at. It loads nothing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.resume import NEVER
from slime.config.roles import parse_megatron_role_args
from slime.utils import manifest
from slime.utils.checkpoint_paths import (
    MODEL_SHAPE_FILE,
    STATE_MANIFEST,
    TRACKER_FILE,
    classify_checkpoint,
    iteration_dir,
    read_tracker,
)
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)


def resumed(args: Args) -> Any:
    """The flags of a run that goes on from the last checkpoint of its own."""
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
    there = sorted(path.parent.name for path in root.glob(f"iter_*/{manifest.FILE}"))
    if there and not (root / TRACKER_FILE).exists():
        raise UsageError(
            f"--save {root} holds {there[-1]}, but no {TRACKER_FILE} that says so: write the iteration's number into "
            "that file to go on from it, give --fresh-output to begin anew, or name another directory."
        )


def _settle_load(args: Args, depth: manifest.Depth) -> Any:
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
    """Whether the data source goes on from its state after an iteration: not where the run begins elsewhere, nor where
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


def _problem(roots: Sequence[Path], step: Any, depth: manifest.Depth, *, with_state: bool) -> str | None:
    """What is wrong with an iteration of all roots, or with the data source's state after it.

    The iteration of the first root says which state belongs to it. None does where a data source of the user's own
    wrote what it likes, or where nothing was drawn from one.
    """
    for directory in (iteration_dir(root, step) for root in roots):
        if not directory.is_dir():
            return f"{directory} does not exist"
        if not (directory / MODEL_SHAPE_FILE).is_file() and not (directory / manifest.FILE).is_file():
            logger.info("%s is not slime's and has no %s: it is not verified", directory, manifest.FILE)
        elif problem := manifest.what_is_wrong(directory / manifest.FILE, depth):
            return problem
    of_state = iteration_dir(roots[0], step) / STATE_MANIFEST
    if not with_state or not of_state.exists():
        return None
    if problem := manifest.what_is_wrong(of_state, depth):
        more = "(the data source's state: where it is gone, --verify-checkpoint none begins with the first prompt)"
        return f"{problem} {more}"
    return None
