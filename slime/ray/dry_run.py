"""`--dry-run`: what a run would do, without Ray, engines, weights or a GPU.

It gathers the facts that flags alone do not say (the device, the prompt file, a tokenizer, the user's hooks), lets
slime.plan make the plan, and prints it. Nothing is started, and only the tokenizer is heavy to import.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.flags.rollout import RolloutFlags
from slime.config.parser import defaults_of
from slime.plan import Facts, HookReport, Plan, make_plan
from slime.plan.fit import misfits
from slime.plan.render import render
from slime.plan.rows import read_rows_of
from slime.ray.plan_check import engine_kinds, find_device, find_format, is_for_this_machine
from slime.rollout.base_types import HOOKS
from slime.rollout.hook_signatures import signature_problem
from slime.utils.errors import UsageError
from slime.utils.misc import load_function
from slime.utils.pipes import reader_may_leave

EXIT_USAGE = 2


def dry_run(checked: Any) -> int:
    """Print the plan of a checked command line, and write it to --dry-run-json.

    Args:
        checked: `slime.config.parse.Checked`: the args, why a run would be refused, and which flags were given.

    Returns:
        0, or 2 where a run would be refused.

    Raises:
        UsageError: the command line contradicts itself, so that there is nothing to plan; or the JSON file cannot be
            written.
    """
    args, problems = checked.args, checked.problems
    if problems.wrong:
        raise UsageError(problems.all())
    refused = list(dict.fromkeys([*problems.environment, *problems.unsupported]))
    plan = make_plan(args, gather_facts(args, refused, checked.warnings(), problems.lacking))
    if is_for_this_machine(args) and not args.ignore_plan:
        plan = dataclasses.replace(plan, refused=[*plan.refused, *misfits(plan.fit).refused])
    if args.dry_run_json:
        write_json(plan, args.dry_run_json)
    with reader_may_leave():
        render(plan, sys.stdout)
    return EXIT_USAGE if plan.refused else 0


def write_json(plan: Plan, path: str) -> None:
    """Write the plan as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(dataclasses.asdict(plan) | {"does_fit": plan.does_fit}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--dry-run-json {path} cannot be written: {error.strerror}; name another file.") from error


def gather_facts(args: Args, refused: list[str], warnings: list[str], lacking: Sequence[str] = ()) -> Facts:
    """Everything that the plan needs and that is not in the flags; `lacking` is what only a run needs."""
    data, rows, missing = read_rows_of(args)
    missing += lacking
    has_engines = bool(args.hf_checkpoint) and not args.debug_train_only
    if has_engines and not Path(args.hf_checkpoint, "config.json").is_file():
        missing.append(f"config.json in {args.hf_checkpoint}: engines are planned in 16 bit, and may run in less")
    return Facts(
        device=find_device(args.accelerator, args.plan_device),
        data=data,
        engines=engine_kinds(args),
        weight_format=find_format(args.hf_checkpoint),
        hooks=list(hook_reports(args)),
        rows=rows,
        missing=missing,
        warnings=warnings,
        refused=refused,
    )


def hook_reports(args: Args) -> Iterator[HookReport]:
    """Every hook that a flag names, with where it was found or why it could not be used."""
    own = defaults_of(RolloutFlags)["rollout_function_path"]
    for attribute, protocol in HOOKS.items():
        value = vars(args)[attribute]
        for path in value if isinstance(value, list) else [value]:
            if path and not (attribute == "eval_function_path" and path in (own, args.rollout_function_path)):
                yield hook_report("--" + attribute.replace("_", "-"), path, protocol)
    for dataset in args.eval_datasets:
        for name in ("custom_rm_path", "custom_generate_function_path"):
            if path := vars(dataset)[name]:
                yield hook_report(f"{name} of {dataset.name}", path, HOOKS[name])


def hook_report(flag: str, path: str, protocol: type) -> HookReport:
    """Load one hook and say where it is."""
    try:
        found = load_function(path)
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's module is code like any other: what it raises is what we report
        return HookReport(flag, path, None, f"{type(error).__name__}: {error}")
    problem = signature_problem(found, protocol)
    return HookReport(flag, path, None if problem else _place(found), problem)


def _place(function: Any) -> str:
    """file:line of a function or class."""
    try:
        target = inspect.unwrap(function)
        file = inspect.getsourcefile(target) or "?"
        return f"{os.path.relpath(file)}:{inspect.getsourcelines(target)[1]}"
    except (TypeError, OSError):
        return "without source"
