"""Two runs are not mixed: who writes to a directory that holds a run goes on with that, or moves it aside.

A run goes on with --resume auto, or with --load of the directory; --fresh-output moves the earlier run to `<dir>.1`.
Two runs at once in one directory are refused in any case. Functions return sentences; `move_earlier_runs` and
`claim_run_dirs` alone change something.

--resume says whether a run goes on from what an earlier one saved; the same command line serves both times. It sets
--load and what is loaded with it, before anything is derived from them; it opens no checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.checkpoints.paths import classify_checkpoint, latest_iteration
from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.config.roles import FLAG as ROLES_FLAG
from slime.config.roles import critic_save_dir
from slime.processes.directories import (
    METRICS_FILE,
    began_before_requeue,
    claim,
    earlier_run,
    is_claimed,
    place_aside,
    sign,
)
from slime.processes.sweeper import live_output_dirs
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)

# Values that may name a place in an earlier run's directory because the new run will write there.
_OUTPUTS = frozenset(
    (
        *("save", "output_dir", "save_hf", "dump_details", "save_debug_rollout_data", "save_debug_train_data"),
        *("update_weight_disk_dir", "update_weight_local_checkpoint_dir", "wandb_dir", "tb_project_name"),
        *("ray_timeline_path", "dry_run_json", "ci_save_grad_norm", "memory_snapshot_dir"),
    )
)
# Attributes that are made of a flag of another name.
_FLAGS = {
    "eval_datasets": "--eval-prompt-data",
    "prompt_sources": "--prompt-data",
    "engine_models": "--sglang-config",
    "megatron_role_values": ROLES_FLAG,
    "tokenizer_model": "--hf-checkpoint",
}


def check_run_dirs(args: Args, given_load: str | None) -> Iterator[str]:
    """No earlier run is in the way.

    Args:
        args: derived; reads `save`, `output_dir`, `resume`, `fresh_output` and, for --fresh-output, every value.
        given_load: --load as given (or as --resume says).
    """
    if being_written := [_being_written(flag, path) for flag, path in _written(args).items() if is_claimed(path)]:
        yield from being_written
        return
    if args.fresh_output:
        if args.resume == AUTO:
            yield "--fresh-output begins anew and --resume auto goes on: leave one of the two out."
            return
        for flag, directory in _outermost(_used(args)).items():
            if reason := _why_it_stays(args, given_load, directory):
                yield f"--fresh-output cannot move {flag} {directory}: {reason}"
    elif not goes_on(args, given_load):
        for flag, directory in _outermost(_used(args)).items():
            if not _is_same(given_load, directory):
                yield _refusal(args, flag, directory)


def goes_on(args: Args, given_load: str | None) -> bool:
    """Whether a command line says that its own --save is gone on with, if it holds anything."""
    return args.save is not None and (args.resume == AUTO or _is_same(given_load, args.save))


def run_dir_warnings(args: Args, given_load: str | None) -> Iterator[str]:
    """What becomes of an earlier run, where that is not seen at once."""
    if args.fresh_output:
        for flag, directory in _outermost(_used(args)).items():
            what, place = earlier_run(directory), place_aside(directory.resolve())
            yield f"--fresh-output: {flag} {directory} holds a run ({what}), which is moved to {place}."
        return
    if not (args.save and goes_on(args, given_load)):
        return
    resumes = _is_same(args.load, args.save) and not args.finetune and latest_iteration(args.save) is not None
    if not resumes:
        for flag, directory in _outermost(_used(args)).items():
            yield (
                f"{flag} {directory} holds a run ({earlier_run(directory)}), and this one begins at rollout "
                f"{args.start_rollout_id or 0}: rollouts that are done again get a second record in {METRICS_FILE}, "
                "and their checkpoints are replaced."
            )


def move_earlier_runs(args: Args) -> None:
    """Move what --fresh-output moves, before anything of the new run is written; does nothing without it.

    Raises:
        UsageError: a directory cannot be moved.
    """
    if not args.fresh_output:
        return
    for directory in _outermost(_used(args)).values():
        source = directory.resolve()  # behind a link, the directory and not the link
        place = place_aside(source)
        try:
            os.rename(source, place)
            source.mkdir()
        except OSError as error:
            raise UsageError(f"--fresh-output cannot move {source} to {place}: {error.strerror}.") from error
        logger.info("moved %s to %s (--fresh-output)", source, place)


def claim_run_dirs(args: Args) -> list[int]:
    """Keep other runs of this host out of the directories that a run writes, and sign them.

    Returns:
        descriptors; the directories are free again when these are closed.

    Raises:
        UsageError: another run has begun to write to one of them since the command line was checked.
    """
    claimed: list[int | None] = []
    for flag, path in _written(args).items():
        try:
            path.mkdir(parents=True, exist_ok=True)
            claimed.append(claim(path))
            sign(path)
        except BlockingIOError:
            raise UsageError(_being_written(flag, path)) from None
        except OSError as error:
            raise UsageError(f"{flag} {path} cannot be written: {error.strerror}.") from error
    return [descriptor for descriptor in claimed if descriptor is not None]


def _being_written(flag: str, path: Path) -> str:
    return f"{flag} {path}: another run is writing there now; wait for its end, or name another directory."


def _used(args: Args) -> dict[str, Path]:
    """flag -> directory, of those that the run will write and that hold an earlier one."""
    return {flag: path for flag, path in _written(args).items() if earlier_run(path)}


def _written(args: Args) -> dict[str, Path]:
    """flag -> directory, of those that the run will write."""
    written = {"--save": args.save, "--output-dir": args.output_dir}
    if args.use_critic:
        written["the critic's --save"] = critic_save_dir(args)
    if _is_same(args.output_dir, args.save):
        del written["--output-dir"]
    return {flag: Path(path) for flag, path in written.items() if path is not None}


def _outermost(directories: Mapping[str, Path]) -> dict[str, Path]:
    """Those that are in no other one."""
    places = {flag: path.resolve() for flag, path in directories.items()}
    return {
        flag: path
        for flag, path in directories.items()
        if not any(other in places[flag].parents for other in places.values())
    }


def _refusal(args: Args, flag: str, directory: Path) -> str:
    ways = [f"--fresh-output moves it to {place_aside(directory.resolve())} and begins anew"]
    if args.save is not None:
        newest = latest_iteration(args.save)
        after = f"begins again, for --save {args.save} holds no checkpoint"
        after = after if newest is None else f"goes on after rollout {newest}"
        ways = [f"--resume auto {after}", f"--load {args.save} does the same", *ways]
    else:
        ways.append("another --output-dir leaves it alone")
    return f"{flag} {directory} holds another run ({earlier_run(directory)}): {'; '.join(ways)}."


def _why_it_stays(args: Args, given_load: str | None, directory: Path) -> str | None:
    """Why a directory cannot be moved aside; None when it can."""
    source = directory.resolve()
    if _is_in(Path.cwd(), source):
        return "it is the working directory, or holds it; name another directory."
    values = {**vars(args), "load": given_load}
    if found := next((flag for flag, path in _inputs(values) if _is_in(path, source)), None):
        return f"{found} is in it; name another directory, or copy what {found} names to another place."
    if any(_is_in(live, source) for live in live_output_dirs()):
        return "a run is still going on there, or just ending; wait for its end, or name another directory."
    if os.path.ismount(source) or not os.access(source.parent, os.W_OK):
        return "it is a mount point, or its parent cannot be written; name another directory."
    return None


def _inputs(values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """(flag, path) of every value that the run reads something from, if it is a path."""
    for name, value in values.items():
        if name in _OUTPUTS:
            continue
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if name in ("eval_datasets", "prompt_sources"):
            value = [dataset.path for dataset in value]
        elif name == "engine_models":
            value = [model.model_path for model in value]
        for text in _texts(value):
            # DATA@[0:8], FILE.py:function, DUMP/{rollout_id}.pt
            for path in (text, text.partition("@[")[0], text.rpartition(":")[0], text.partition("{")[0]):
                if path and os.path.exists(path):
                    yield flag, Path(path)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _OUTPUTS:
                yield from _texts(inner)


def _is_same(path: str | Path | None, other: str | Path | None) -> bool:
    try:
        return path is not None and other is not None and os.path.realpath(path) == os.path.realpath(other)
    except ValueError:  # a null byte: it is no path at all
        return False


def _is_in(path: Path, directory: Path) -> bool:
    """Whether a path is in a directory, or would not be found any more because a link to it is."""
    spelt = Path(os.path.abspath(path))
    return any(
        one.resolve().is_relative_to(directory) for one in (spelt, *[p.parent for p in (spelt, *spelt.parents)])
    )


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
