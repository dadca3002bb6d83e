"""--resume: whether a run goes on from what an earlier one saved; the same command line serves both times.

It sets --load and what is loaded with it, before anything is derived from them; it opens no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.checkpoints.paths import classify_checkpoint, latest_iteration
from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.processes.directories import began_before_requeue

AUTO, NEVER = "auto", "never"
_EVERYTHING: dict[str, Any] = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
_WEIGHTS_ALONE: dict[str, Any] = {"finetune": True, "no_load_optim": True, "no_load_rng": True}


def resume_values(args: Args) -> tuple[dict[str, Any], list[str]]:
    """What --resume sets, attribute -> value, and sentences about why it cannot be done.

    Raises:
        UsageError: a checkpoint's tracker file holds nonsense.
    """
    choice = args.resume
    if choice is None:
        return {}, []
    if choice == NEVER:
        return {**_WEIGHTS_ALONE, "start_rollout_id": args.start_rollout_id or 0}, []
    root = args.save if choice == AUTO else choice
    if root is None:
        return {}, [NoEffect("--resume auto", "without --save, where it looks for a checkpoint")]
    iteration = latest_iteration(root) if classify_checkpoint(root) == "megatron" else None
    if choice == AUTO:
        on = {"load": root, "ckpt_step": None, "start_rollout_id": None, **_EVERYTHING}
        return (on if iteration is not None else {}), []
    if iteration is None:
        return {}, [
            f"--resume {root} holds no iteration of a run; give the --save of a run, auto (which looks into this "
            "run's --save) or never."
        ]
    if args.load is not None and Path(args.load) != Path(root):
        return {}, [f"--resume {root} and --load {args.load} are two places to go on from; leave --load out."]
    return {"load": root, "start_rollout_id": args.start_rollout_id, **_EVERYTHING}, []


def go_on_after_requeue(args: Args) -> list[str]:
    """Make --fresh-output a --resume auto where the job itself has saved in --save, before Slurm requeued it; say so.

    Slurm gives a requeued job its first command line again: --fresh-output would move the job's own work aside.
    """
    if not args.fresh_output or args.resume == AUTO or args.save is None or not began_before_requeue(args.save):
        return []
    if latest_iteration(args.save) is None:
        return []  # nothing to go on from
    args.fresh_output, args.resume = False, AUTO
    return [f"--fresh-output: Slurm has requeued this job, whose own run is in --save {args.save}: it goes on."]


def line_to_go_on(words: Sequence[str]) -> list[str]:
    """Return a command line with what makes its run go on: --resume auto, and nothing that contradicts it.

    Another --resume is replaced by flags that say the same where there is no checkpoint yet: with auto they count for
    the begin of a run alone.

    Example:
        >>> line_to_go_on(["train.py", "--resume", "other", "--save", "out", "--fresh-output"])
        ['train.py', '--load', 'other', '--save', 'out', '--resume', 'auto']
    """
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name == "--resume":
            choice = value if equals else next(left, AUTO)
            begin = {AUTO: [], NEVER: ["--finetune", "--no-load-optim", "--no-load-rng"]}
            kept += begin.get(choice, ["--load", choice])
        elif name != "--fresh-output":
            kept.append(word)
    return [*kept, "--resume", AUTO]
