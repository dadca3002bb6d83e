"""From the command line to an exit status: what train.py and train_async.py have in common around their schedule.

It turns every end of a run into one readable message and a status: 0 done, 1 something failed, 2 unusable input
(nothing was started), 130 Ctrl-C, 143 SIGTERM.

Every run is checked before anything starts: does it fit into the memory that there is (`check_plan`)? slime.plan does
the arithmetic. A dry run gathers the facts that flags alone do not say (the device, the prompt file, a tokenizer, the
user's hooks) without starting Ray, engines or a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.checkpoints.paths import latest_iteration
from slime.config.args import Args
from slime.config.flags.rollout import RolloutFlags
from slime.config.megatron.lora_plan import LoraPlan
from slime.config.parse import Checked, CommandLine, accept
from slime.config.parser import defaults_of
from slime.config.problems import collected
from slime.config.rules.run_dirs import line_to_go_on
from slime.models.families import family_of_config
from slime.observability.logging_utils import configure_logger
from slime.plan import EngineKind, Facts, HookReport, Plan, make_plan
from slime.plan.fit import ROOMY, misfits
from slime.plan.layout import EngineGroup, slot_layout
from slime.plan.times import DEFAULT_GPU, DEVICES, Device, cpu_device, device_of_gpu
from slime.plan.tower import Tower
from slime.processes.progress import host_memory
from slime.ray.utils import ActorFailure
from slime.rollout.base_types import HOOKS
from slime.rollout.hooks.signatures import signature_problem
from slime.utils.accelerator import cuda_is_available
from slime.utils.errors import UsageError
from slime.utils.eval_config import dataset_hooks
from slime.utils.http.api_keys import command_line_without_secrets
from slime.utils.misc import attempt, load_function, reader_may_leave
from slime.weights.formats import WeightFormat, format_of_checkpoint
from slime.weights.names import read_config

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


def drive(
    train: Callable[[Any], None],
    *,
    check: Callable[[Any], None] | None = None,
    warn: Callable[[Any], Iterable[str]] | None = None,
) -> int:
    """Parse the command line and run `train(args)`.

    Args:
        train: the schedule.
        check: raises UsageError for flags that this driver cannot work with.
        warn: what flags this driver works with but are seldom meant for it.

    Returns:
        the exit status.
    """
    configure_logger()
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it reports each optional package that is not there
    signal.signal(signal.SIGTERM, _leave)
    args: Args | None = None
    try:
        command_line = CommandLine()
        if (text := command_line.answer(sys.argv[1:])) is not None:
            with reader_may_leave():
                sys.stdout.write(text)
            return 0
        checked = _checked(command_line, check, warn)
        if checked.args.dry_run:
            return _plan(checked, command_line)
        args = settle_turns(accept(checked), checked.explicit)
        check_plan(args)
        train(args)
    except UsageError as error:
        for message in error.messages:
            _say(f"error: {message}")
        return EXIT_USAGE
    except SystemExit:
        if not _Terminated.arrived:
            raise
        _say_how_to_go_on(args)
        return EXIT_TERMINATED  # Ray's wait makes a SystemExit(1) of ours
    except KeyboardInterrupt:
        _say("interrupted")
        _say_how_to_go_on(args)
        return EXIT_INTERRUPTED
    except (ActorFailure, TimeoutError, RuntimeError) as error:
        _report(error, None if args is None else args.output_dir)
        return EXIT_FAILED
    return 0


def _plan(checked: Checked, command_line: CommandLine) -> int:
    status = dry_run(checked)
    if checked.args.tune:
        print_tuned(sys.argv[1:], command_line)
    return status


def _checked(
    command_line: CommandLine,
    check: Callable[[Any], None] | None,
    warn: Callable[[Any], Iterable[str]] | None,
) -> Checked:
    checked = command_line.check(sys.argv[1:])
    if check is not None:
        collected(checked.problems.wrong, check, checked.args)
    if warn is not None:
        checked = dataclasses.replace(checked, driver_warnings=tuple(warn(checked.args)))
    return checked


class _Terminated:
    """Whether this process was sent SIGTERM."""

    arrived = False


def _leave(signum: int, frame: Any) -> NoReturn:
    """SIGTERM becomes an exception of the main thread, so that every `finally` ends what it started."""
    _Terminated.arrived = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending takes seconds: a second one must not cut it short
    raise SystemExit(EXIT_TERMINATED)


def _say_how_to_go_on(args: Args | None) -> None:
    """Print, as the last line, the command that resumes a run that was interrupted, if one can."""
    if args is None or not args.save or args.eval_only or args.debug_rollout_only:
        return
    newest = latest_iteration(args.save)
    what = "begin again, for there is no checkpoint yet" if newest is None else f"go on after rollout {newest}"
    _say(f"to {what}:")
    _say(shlex.join(command_line_without_secrets(line_to_go_on(sys.orig_argv), vars(args))))


def _report(error: Exception, output_dir: str | None) -> None:
    """Print one line for the user; both tracebacks go into a file next to the logs."""
    _say(f"error: {error}")
    if output_dir is None:
        traceback.print_exception(error)
        return
    path = Path(output_dir).resolve() / "logs" / "error.txt"
    details = error.details if isinstance(error, ActorFailure) else ""
    text = details + "\n\n" + "".join(traceback.format_exception(error))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as problem:  # a full disk may be why the run ends
        _say(f"{text}\n{path} cannot be written: {problem}")
        return
    _say(f"full traceback: {path}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


PLACEHOLDER = "placeholder"


def is_for_this_machine(args: Args) -> bool:
    """Whether a plan is for the memory that the run will find: not where its device is assumed or named, nor where
    the slots of a run without GPUs may be on other machines than this one."""
    if args.accelerator == "cpu":
        return not os.environ.get("RAY_ADDRESS")
    return args.plan_device is None and cuda_is_available()


def check_plan(args: Args) -> None:
    """Refuse a run that takes far more memory than this machine has; warn of one that may not fit.

    The prompt file is read only where the run does not fit with the prompts that are assumed without it.

    Raises:
        UsageError: it does not fit, by more than the plan may be wrong, and there is no --ignore-plan.
    """
    facts = measured_facts(args)
    plan = make_plan(args, facts)
    if not plan.does_fit:
        from slime.plan.render import read_rows_of  # with a tokenizer

        plan = make_plan(args, dataclasses.replace(facts, data=read_rows_of(args)[0]))
    found = misfits(plan.fit)
    is_certain = is_for_this_machine(args)
    if found.refused and is_certain and not args.ignore_plan:
        raise UsageError(found.refused)
    assumed = "" if is_certain else f" (planned for {plan.device.name}, which is assumed)"
    for sentence in [*found.refused, *found.doubtful]:
        logger.warning("%s%s", sentence, assumed)
    say_graphs(args)


def say_graphs(args: Args) -> None:
    """Log for how many requests engines capture decode graphs, where slime chooses."""
    from slime.backends.sglang_utils.server_args import graph_defaults

    for model in args.engine_models:
        for group in model.groups:
            for sizes in graph_defaults(args, group.settings, group.worker_type).values():
                listed = " ".join(map(str, sizes))
                logger.info(
                    "engines of %s capture decode graphs, --sglang-cuda-graph-bs-decode %s", model.name, listed
                )


STAYS: dict[str, Any] = {
    "offload_train": False,
    "disable_grad_buffers_cpu_backup": False,
    "disable_param_buffers_cpu_backup": False,
}
BOTH_STAY = {**STAYS, "offload_rollout": False}


def settle_turns(args: Args, explicit: Collection[str]) -> Args:
    """Keep trainer and engines, or the trainer alone, on the GPU that they share where the plan has room for it.

    Leaving and coming back costs the trainer two copies of its state in every step, and the engines 0.1 s. Only a plan
    for the GPUs of this machine decides, and only where no flag does. An engine that is replaced would find the
    trainer on its GPU, and take less: with --use-fault-tolerance the trainer leaves.

    Args:
        args: of the run.
        explicit: the attributes whose flags were given.

    Returns:
        the args, with `offload_train`, and `offload_rollout` too, off where they stay.
    """
    takes_turns = args.colocate and args.offload_train and args.offload_rollout
    is_open = takes_turns and not args.use_critic and not args.use_fault_tolerance
    if not is_open or {"offload", "offload_train"} & set(explicit) or not is_for_this_machine(args):
        return args
    ways = {"the trainer stays on its GPU while engines generate": STAYS}
    if "offload_rollout" not in explicit:
        ways = {"trainer and engines stay on their GPU": BOTH_STAY} | ways
    for what, changes in ways.items():
        stays = args.replace(**changes)
        facts = measured_facts(stays)
        fullest = max(make_plan(stays, facts).fit, key=lambda moment: moment.total, default=None)
        if fullest is None or not all(kind.serves_policy for kind in facts.engines or ()):
            return args  # the plan counts the policy's engines alone
        if fullest.total <= ROOMY * fullest.limit:
            most = f"{fullest.total / 1e9:.1f} of {fullest.limit / 1e9:.1f} GB at most, while {fullest.when}"
            logger.info("%s: %s; --offload-train makes both leave", what, most)
            return stays
    return args


def measured_facts(args: Args) -> Facts:
    """The device, the engines and the forms of weights of a command line; no data, no hooks."""
    return Facts(
        device=find_device(args.accelerator, args.plan_device),
        engines=engine_kinds(args),
        weight_format=find_format(args.hf_checkpoint),
        tower=tower_of(args.hf_checkpoint),
        adapted=adapted_linears(args),
    )


def find_device(accelerator: str, given: str | None = None) -> Device:
    """The device of --plan-device, of this machine, or the default one where there is no GPU."""
    if accelerator == "cpu":
        return cpu_device(host_memory())
    if given or not cuda_is_available():
        return DEVICES[given or DEFAULT_GPU]
    import torch

    properties = torch.cuda.get_device_properties(0)
    return device_of_gpu(properties.name, properties.total_memory)


def find_format(hf_checkpoint: str | None) -> WeightFormat | None:
    """How --hf-checkpoint is quantised; None where that is refused, or where it cannot be read, which is said then."""
    try:
        return format_of_checkpoint(hf_checkpoint)
    except (UsageError, OSError, ValueError):
        return None


def engine_kinds(args: Args) -> list[EngineKind]:
    """Engines of the command line, with the ServerArgs values that slime and the user choose."""
    from slime.backends.sglang_utils.server_args import device_defaults

    layout, models = slot_layout(args), args.engine_models
    is_one = len(models) == 1 and len(models[0].groups) == 1
    found, slot = [], 0
    for model in models:
        defaults = device_defaults(args.accelerator, Path(model.model_path or ""))
        for group in model.groups:
            if slot == layout.num_engine_slots and (gap := layout.reward_offset - layout.engine_offset - slot) > 0:
                found.append(EngineKind(EngineGroup(PLACEHOLDER, gap, 1)))  # the trainer's slots, before the reward's
            slot += group.num_gpus
            kind = PLACEHOLDER if group.worker_type == PLACEHOLDER else f"{model.name} {group.worker_type}"
            found.append(
                EngineKind(
                    EngineGroup("" if is_one else kind, group.num_gpus, group.num_gpus_per_engine),
                    defaults | dict(group.settings),
                    serves_policy=model.model_path == args.hf_checkpoint,
                )
            )
    return found


def dry_run(checked: Checked) -> int:
    """Print the plan of a checked command line, and write it to --dry-run-json.

    Args:
        checked: the args, why a run would be refused, and which flags were given.

    Returns:
        0, or 2 where a run would be refused.

    Raises:
        UsageError: the command line contradicts itself, so that there is nothing to plan; or the JSON file cannot be
            written.
    """
    from slime.plan.render import render  # with rich

    problems = checked.problems
    if problems.wrong:
        raise UsageError(problems.all())
    args = settle_turns(checked.args, checked.explicit)
    refused = list(dict.fromkeys([*problems.environment, *problems.unsupported]))
    plan = make_plan(args, gather_facts(args, refused, checked.warnings(), problems.lacking))
    if is_for_this_machine(args) and not args.ignore_plan:
        plan = dataclasses.replace(plan, refused=[*plan.refused, *misfits(plan.fit).refused])
    if args.dry_run_json:
        write_json(plan, args.dry_run_json)
    with reader_may_leave():
        render(plan, sys.stdout)
    return EXIT_USAGE if plan.refused else 0


def print_tuned(argv: Sequence[str], command_line: CommandLine) -> None:
    """Look for a better command line than one that has a plan, and print it with what each change gains (--tune)."""
    from slime.plan.render import read_rows_of
    from slime.plan.tune import knobs, tune, tuned_lines

    given = command_line.check(argv)
    args = settle_turns(given.args, given.explicit)
    data = read_rows_of(args)[0]
    plan = make_plan(args, dataclasses.replace(measured_facts(args), data=data))

    def judge(tried: Sequence[str]) -> Plan | None:
        checked = command_line.check(tried)
        if checked.problems.wrong or checked.problems.unsupported:
            return None
        settled = settle_turns(checked.args, checked.explicit)
        return make_plan(settled, dataclasses.replace(measured_facts(settled), data=data))

    ideas = knobs(
        args.actor_num_nodes * args.actor_num_gpus_per_node,
        has_experts=bool(plan.params and plan.params["experts"]),
        colocated=args.colocate,
    )
    with reader_may_leave():
        for line in tuned_lines(*tune(argv, plan, judge, list(ideas))):
            print(line)


def write_json(plan: Plan, path: str) -> None:
    """Write the plan as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(dataclasses.asdict(plan) | {"does_fit": plan.does_fit}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--dry-run-json {path} cannot be written: {error.strerror}; name another file.") from error


def tower_of(hf_checkpoint: str | None) -> Tower | None:
    """The part of --hf-checkpoint that sees images; None where it has none that is known."""
    config = read_config(hf_checkpoint or "")
    family, vision = family_of_config(config), config.get("vision_config")
    return Tower.of(vision) if family is not None and family.sees_images and vision else None


def adapted_linears(args: Args) -> tuple[str, ...]:
    """Megatron's linear layers with LoRA adapters; none without them, and where the model's family is not known."""
    lora = LoraPlan.of(args)
    return tuple(lora.linears) if lora else ()


def gather_facts(args: Args, refused: list[str], warnings: list[str], lacking: Sequence[str] = ()) -> Facts:
    """Everything that the plan needs and that is not in the flags; `lacking` is what only a run needs."""
    from slime.plan.render import read_rows_of  # with a tokenizer

    data, rows, missing = read_rows_of(args)
    missing += lacking
    has_engines = bool(args.hf_checkpoint) and not args.debug_train_only
    if has_engines and not Path(args.hf_checkpoint, "config.json").is_file():
        missing.append(f"config.json in {args.hf_checkpoint}: engines are planned in 16 bit, and may run in less")
    return dataclasses.replace(
        measured_facts(args),
        data=data,
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
    for dataset, name, path in dataset_hooks(args):
        yield hook_report(f"{name} of {dataset.name}", path, HOOKS[name])


def hook_report(flag: str, path: str, protocol: type) -> HookReport:
    """Load one hook and say where it is."""
    found, error = attempt(load_function, path)
    if error is not None:
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
