"""Rules of what is dumped, replayed, recorded and checked during a run."""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Iterable

from slime.checkpoints.rollout_files import DEFAULT_KEEP, KeepRule
from slime.config.args import Args
from slime.config.problems import Check, Rule, WithoutEffect, for_each, plain_option
from slime.utils.dp_schedule import total_train_steps

_ID = ("rollout_id",)
_NORM = ("role", "rollout_id", "step_id")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "save_hf": _ID,
    "save_debug_rollout_data": _ID,
    "save_debug_train_data": ("rollout_id", "rank"),
    "load_debug_rollout_data": _ID,
    "load_forge_rollout_data": _ID,
    "ci_save_grad_norm": _NORM,
    "ci_load_grad_norm": _NORM,
}
"""Attribute of a path template -> what can be filled in."""


def _template_problem(args: Args, name: str) -> str | None:
    """Why a path template cannot be filled in; None where it can, or is not given."""
    template, fields = vars(args)[name], TEMPLATES[name]
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None}
    except ValueError as error:
        return f"{error}."
    if unknown := sorted(names - set(fields)):
        known = " and ".join(f"{{{name}}}" for name in fields)
        return f"only {known} can be filled in, not {{{unknown[0]}}}."
    return None


def _dumps(args: Args) -> tuple[str | None, str | None]:
    return args.save_debug_rollout_data, args.save_debug_train_data


def _keep_problem(text: str) -> bool:
    try:
        KeepRule.parse(text)
    except ValueError:
        return True
    return False


CHECKS: tuple[Check, ...] = (
    # what is recorded of rollouts
    Rule(
        lambda a: _keep_problem(a.keep_rollouts),
        "--keep-rollouts {keep_rollouts}: write all, none, or a list of last:N, every:N and max-gb:X, each above 0, "
        f"such as {DEFAULT_KEEP}.",
    ),
    Rule(
        lambda a: a.rollout_record_fraction == 0,
        "--rollout-record-fraction 0 records nothing; give a share above 0, or --keep-rollouts none.",
    ),
    WithoutEffect(
        lambda a: a.keep_rollouts == "none" and a.rollout_record_fraction != 1,
        "--rollout-record-fraction {rollout_record_fraction}",
        "with --keep-rollouts none",
    ),
    # dumps overwrite neither each other nor what is replayed (V12)
    Rule(
        lambda a: a.save_debug_rollout_data is not None and a.save_debug_rollout_data == a.save_debug_train_data,
        "--save-debug-rollout-data and --save-debug-train-data are both {save_debug_rollout_data} and would overwrite "
        "each other; give two names.",
    ),
    Rule(
        lambda a: a.load_debug_rollout_data is not None and a.load_debug_rollout_data in _dumps(a),
        "--load-debug-rollout-data {load_debug_rollout_data} would be overwritten by this run's own dumps; give those "
        "another name.",
    ),
    Rule(
        lambda a: a.load_forge_rollout_data is not None and a.load_forge_rollout_data in _dumps(a),
        "--load-forge-rollout-data {load_forge_rollout_data} would be overwritten by this run's own dumps; give those "
        "another name.",
    ),
    for_each(
        lambda a: TEMPLATES,
        _template_problem,
        lambda a, name: f"{plain_option(name)} {vars(a)[name]}: {_template_problem(a, name)}",
    ),
    # a replay has a file for each rollout, and takes a share of it that there is (V13)
    Rule(
        lambda a: a.load_debug_rollout_data_subsample is not None and not 0 < a.load_debug_rollout_data_subsample <= 1,
        "--load-debug-rollout-data-subsample {load_debug_rollout_data_subsample} must lie in (0, 1].",
    ),
    Rule(
        lambda a: a.load_debug_rollout_data is not None and a.num_rollout is None and a.num_epoch is not None,
        "--load-debug-rollout-data needs --num-rollout, the number of files to train on: --num-epoch {num_epoch} "
        "counts prompts.",
    ),
    Rule(
        lambda a: a.ci_save_grad_norm is not None and a.ci_save_grad_norm == a.ci_load_grad_norm,
        "--ci-save-grad-norm and --ci-load-grad-norm are both {ci_save_grad_norm}: each norm would be compared with "
        "itself; give two names, or one of the flags.",
    ),
    Rule(
        lambda a: a.record_memory_history and a.memory_recorder == "torch" and a.accelerator == "cpu",
        "--record-memory-history with --memory-recorder torch records CUDA's allocator, which --accelerator cpu does "
        "not have; give --memory-recorder memray, which records host memory.",
    ),
    WithoutEffect(
        lambda a: a.memory_snapshot_path != "snapshot.pickle" and not a.record_memory_history,
        "--memory-snapshot-path {memory_snapshot_path}",
        "without --record-memory-history",
    ),
)
MISSING_RECORDER = Rule(
    lambda a: a.record_memory_history and a.memory_recorder == "memray" and importlib.util.find_spec("memray") is None,
    "--memory-recorder memray is not installed here; pip install memray.",
)


def template_notes(args: Args) -> Iterable[str]:
    """Say where each file of a run takes the place of the one before: templates without {rollout_id}."""
    several = args.num_rollout is None or args.num_rollout - (args.start_rollout_id or 0) > 1
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        template = vars(args)[name]
        if template is not None and "{rollout_id" not in template and several:
            option = plain_option(name)
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
