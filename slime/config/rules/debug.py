"""Rules of what makes a run easy to debug: dumps, replays, records, checks, and --deterministic.

What a user's own functions do, which may not be repeatable bit for bit, is not known.
"""

from __future__ import annotations

import importlib.util
import os
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.checkpoints.rollout_files import DEFAULT_KEEP, KeepRule
from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.problems import Check, Rule, WithoutEffect, each, for_each, plain_option, where
from slime.utils.dp_schedule import total_train_steps
from slime.utils.errors import sentences

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
    # dumps overwrite neither each other nor what is replayed
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
    # a replay has a file for each rollout, and takes a share of it that there is
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


# ---- --deterministic: what it sets, and what cannot be repeated bit for bit

ONE_REQUEST = {"sglang_max_running_requests": 1, "sglang_disable_radix_cache": True}
"""On CPU an engine's logits move by 4e-6 with what else is in the batch and in the cache, which flips a rare token."""
ORDERED = {"NCCL_ALGO": "Ring"}
"""NCCL otherwise chooses an algorithm, and so the order of a sum, by what it measures."""


def deterministic_values(args: Args) -> dict[str, Any]:
    """What the flag sets, attribute -> value.

    Args:
        args: parsed flags; `accelerator` is resolved.
    """
    if not args.deterministic:
        return {}
    values: dict[str, Any] = {"deterministic_mode": True}
    if not args.debug_train_only:
        values["sglang_enable_deterministic_inference"] = True
    if args.accelerator == "cpu":
        return values | (ONE_REQUEST if not args.debug_train_only else {})
    return values | {"train_env_vars": ORDERED | dict(args.train_env_vars)}


def check_ahead(args: Args, *, because: str) -> Iterable[str]:
    """With --deterministic, a run that generates ahead of the trainer can be resumed only where that was foreseen.

    Args:
        args: parsed flags.
        because: what generates ahead.
    """
    given = {
        "--exit-signal-handler": args.exit_signal_handler,
        "--exit-duration-in-mins": args.exit_duration_in_mins is not None,
    }
    can_go_on = args.deterministic and args.save is not None
    return sentences(
        (
            can_go_on and args.update_weights_interval > 1,
            f"--deterministic with {because} and --save needs --update-weights-interval 1, not "
            f"{args.update_weights_interval}: a run that is resumed begins with the weights of its checkpoint, which "
            "engines of the run before did not have yet.",
        ),
        *(
            (
                can_go_on and is_given,
                f"--deterministic with {because} does not go with {flag}: it saves a rollout behind which others are "
                "begun already, and a resumed run begins them with newer weights; leave one of the two out.",
            )
            for flag, is_given in given.items()
        ),
    )


_DEPENDS = "what it takes depends on which samples end first, and cannot be repeated; leave one of the two out."
check_deterministic = where(
    lambda a: a.deterministic,
    *each(
        "partial_rollout dynamic_sampling_filter_path",
        bool,
        f"--deterministic does not go with {{option}}: {_DEPENDS}",
    ),
    Rule(
        lambda a: a.over_sampling_batch_size not in (None, a.rollout_batch_size),
        f"--deterministic does not go with --over-sampling-batch-size: {_DEPENDS}",
    ),
    Rule(
        lambda a: a.update_weights_in_flight,
        "--deterministic does not go with --update-weights-in-flight: at which token a response goes over to new "
        "weights depends on the time, and cannot be repeated; leave one of the two out.",
    ),
    where(  # which groups have which weights follows from their numbers
        lambda a: keeps_requests_in_flight(a.rollout_function_path),
        Rule(
            lambda a: a.max_weight_staleness is None,
            "--deterministic with --rollout-function-path {rollout_function_path} needs --max-weight-staleness, which "
            "says how many rollouts are begun with the same weights; without it that depends on the time.",
        ),
        lambda a, given: check_ahead(a, because=f"--rollout-function-path {a.rollout_function_path}"),
    ),
    Rule(
        lambda a: a.elastic_dp,
        "--deterministic does not go with --elastic-dp: fewer ranks add gradients in another order; leave one of the "
        "two out.",
    ),
    Rule(
        lambda a: a.sglang_speculative_algorithm,
        "--deterministic does not go with --sglang-speculative-algorithm, whose drafts are not sampled with the seeds "
        "of the samples; leave one of the two out.",
    ),
    where(
        lambda a: a.accelerator == "cpu",
        Rule(
            lambda a: a.sglang_max_running_requests != 1,
            "--deterministic with --accelerator cpu needs --sglang-max-running-requests 1, not "
            "{sglang_max_running_requests}: logits change with the batch there.",
            given="sglang_max_running_requests",
        ),
        Rule(
            lambda a: not a.sglang_disable_radix_cache,
            "--deterministic with --accelerator cpu needs --sglang-disable-radix-cache, not "
            "{sglang_disable_radix_cache}: logits change with the batch there.",
            given="sglang_disable_radix_cache",
        ),
    ),
)
"""Nothing depends on when samples happen to end.

It takes parsed flags, before `deterministic_values` are set, and the attributes whose flags are on the command line.
"""


def check_replay(template: str | None, first_rollout: int | None, num_rollout: int | None) -> Iterator[str]:
    """--load-debug-rollout-data has a file for every rollout; names the first that is missing.

    Args:
        first_rollout: None where only the loaded checkpoint knows it.
        num_rollout: the rollout behind the last; None where it is unknown.
    """
    if template is None or first_rollout is None:
        return
    for rollout_id in range(first_rollout, max(first_rollout + 1, num_rollout or 0)):
        try:
            path = Path(template.format(rollout_id=rollout_id))
        except (ValueError, KeyError, IndexError, AttributeError):
            return  # a rule of debug.py says what is wrong
        if not os.path.isfile(path):
            remedy = "dump it with --save-debug-rollout-data"
            if rollout_id > first_rollout:
                remedy += f", or end before it with --num-rollout {rollout_id}"
            yield f"--load-debug-rollout-data {template}: there is no file {path}; {remedy}."
            return
