"""Rules of what is dumped, replayed, recorded and checked during a run."""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Collection, Iterable, Iterator

from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.utils.train_steps import total_train_steps

_ID = ("rollout_id",)
_NORM = ("role", "rollout_id", "step_id")


def check_dumps(args: Args) -> Iterable[str]:
    """Dumps overwrite neither each other nor what is replayed (V12)."""
    rollout, train = args.save_debug_rollout_data, args.save_debug_train_data
    if rollout is not None and rollout == train:
        yield (
            f"--save-debug-rollout-data and --save-debug-train-data are both {rollout} and would overwrite each "
            "other; give two names."
        )
    for option in ("--load-debug-rollout-data", "--load-forge-rollout-data"):
        replayed = vars(args)[option[2:].replace("-", "_")]
        if replayed is not None and replayed in (rollout, train):
            yield f"{option} {replayed} would be overwritten by this run's own dumps; give those another name."
    yield from check_template("--save-hf", args.save_hf)
    yield from check_template(
        "--save-debug-rollout-data",
        rollout,
    )
    yield from check_template("--save-debug-train-data", train, fields=("rollout_id", "rank"))


def check_replays(args: Args) -> Iterable[str]:
    """A replay has a file for each rollout, and takes a share of it that there is (V13)."""
    share = args.load_debug_rollout_data_subsample
    if share is not None and not 0 < share <= 1:
        yield f"--load-debug-rollout-data-subsample {share} must lie in (0, 1]."
    if args.load_debug_rollout_data is not None and args.num_rollout is None and args.num_epoch is not None:
        yield (
            f"--load-debug-rollout-data needs --num-rollout, the number of files to train on: --num-epoch "
            f"{args.num_epoch} counts prompts."
        )
    yield from check_template("--load-debug-rollout-data", args.load_debug_rollout_data)
    yield from check_template("--load-forge-rollout-data", args.load_forge_rollout_data)


def check_ci(args: Args) -> Iterable[str]:
    """Each gradient norm has a file of its own, and is not compared with itself."""
    yield from check_template("--ci-save-grad-norm", args.ci_save_grad_norm, fields=_NORM)
    yield from check_template("--ci-load-grad-norm", args.ci_load_grad_norm, fields=_NORM)
    if args.ci_save_grad_norm is not None and args.ci_save_grad_norm == args.ci_load_grad_norm:
        yield (
            f"--ci-save-grad-norm and --ci-load-grad-norm are both {args.ci_save_grad_norm}: each norm would be "
            "compared with itself; give two names, or one of the flags."
        )


def check_memory_recorder(args: Args) -> Iterable[str]:
    """The recorder has something to record."""
    if args.record_memory_history and args.memory_recorder == "torch" and args.accelerator == "cpu":
        yield (
            "--record-memory-history with --memory-recorder torch records CUDA's allocator, which --accelerator cpu "
            "does not have; give --memory-recorder memray, which records host memory."
        )
    if args.memory_snapshot_path != "snapshot.pickle" and not args.record_memory_history:
        yield NoEffect(f"--memory-snapshot-path {args.memory_snapshot_path}", "without --record-memory-history")


def missing_recorder(args: Args) -> Iterable[str]:
    """The recorder is installed."""
    if args.record_memory_history and args.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        yield "--memory-recorder memray is not installed here; pip install memray."


def template_notes(args: Args) -> Iterator[str]:
    """Say where each file of a run takes the place of the one before: templates without {rollout_id}."""
    several = args.num_rollout is None or args.num_rollout - (args.start_rollout_id or 0) > 1
    for option in ("--save-debug-rollout-data", "--save-debug-train-data"):
        template = vars(args)[option[2:].replace("-", "_")]
        if template is not None and "{rollout_id" not in template and several:
            yield f"{option} {template} is one file, which every rollout overwrites; add {{rollout_id}} to keep all."
    template = args.ci_save_grad_norm
    if template is None or not args.ci_test or min(args.rollout_batch_size or 0, args.global_batch_size) < 1:
        return  # other checks say what is wrong with a batch
    if total_train_steps(args) != 1:
        required = _NORM if args.use_critic else _NORM[1:]
        if missing := [f"{{{name}}}" for name in required if f"{{{name}" not in template]:
            yield (
                f"--ci-save-grad-norm {template} is overwritten by later train steps; add {' and '.join(missing)} to "
                "keep all."
            )


def check_template(option: str, template: str | None, *, fields: Collection[str] = _ID) -> Iterator[str]:
    """A path template has nothing to fill in but `fields`."""
    if template is None:
        return
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        yield f"{option} {template}: {error}."
        return
    if unknown := sorted(names - set(fields)):
        known = " and ".join(f"{{{name}}}" for name in fields)
        yield f"{option} {template}: only {known} can be filled in, not {{{unknown[0]}}}."


CHECKS = (check_dumps, check_replays, check_ci, check_memory_recorder)
