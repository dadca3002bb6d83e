"""From the command line to checked, frozen `Args`: where slime's, Megatron's and SGLang's flags come together.

Order: parse -> derive -> validate -> freeze. Problems of all stages are collected and reported together, before
anything starts. This is the one module of `slime.config` that imports `slime.rollout`: the hook Protocols and the
reward names.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slime.checkpoints.paths import classify_checkpoint
from slime.checkpoints.remote import localize
from slime.config import ask, derive, roles
from slime.config.alarm_settings import alarm_settings
from slime.config.args import Args
from slime.config.custom_config import FileValues, apply_extra
from slime.config.flags import FLAG_CLASSES
from slime.config.lora_policies import data_problems, policy_values, reward_hooks
from slime.config.mcp_servers import check_mcp
from slime.config.megatron.arguments import (
    add_megatron_arguments,
    args_implied_by_hf,
    derive_megatron,
    megatron_flag_class,
    megatron_refusals,
    megatron_warnings,
    model_args_from_hf,
    teacher_problems,
    without_deepep,
)
from slime.config.megatron.lora_plan import lora_problems
from slime.config.megatron.precision.int4_plan import int4_variables
from slime.config.parser import (
    OLDER_NAMES,
    Parser,
    add_flags,
    defaults_of,
    explicit_flags,
    group_title,
    here,
    with_current_names,
)
from slime.config.problems import NoEffect, Problems, collected, read_file, without_repeats
from slime.config.prompt_sources import prompt_sources
from slime.config.roles import Role, apply_config_files, critic_entry, parse_megatron_role_args
from slime.config.rules import debug, devices, effect, files, generation
from slime.config.rules.backends import backend_problems, problems_of_run
from slime.config.rules.run_dirs import check_run_dirs, go_on_after_requeue, resume_values, run_dir_warnings
from slime.config.sglang.engine_flags import (
    SglangFlags,
    add_sglang_arguments,
    derive_engines,
    derive_sglang,
    draft_problems,
    served_model_problems,
    set_aside,
    sglang_problems,
    sglang_tables,
)
from slime.config.sglang.engine_flags import explain_unknown as explain_unknown_sglang
from slime.rollout.base_types import HOOKS
from slime.rollout.hooks.signatures import is_batch_generate, signature_problem
from slime.rollout.rm_hub import RM_TYPES, rm_needs_label
from slime.rollout.tool_calls import ToolFn
from slime.utils import accelerator
from slime.utils.errors import refuse
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, dataset_hooks, load_eval_config
from slime.utils.misc import is_port_available

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """A command line after all checks.

    Attributes:
        args: frozen; where `problems` is not empty they are only good for a plan.
        problems: why a run would be refused.
        explicit: the attributes whose flags were given.
        given_load: --load as it was given (`args.load` is what the trainer starts from).
        driver_warnings: what works with this driver but is seldom meant.
    """

    args: Args
    problems: Problems
    explicit: frozenset[str]
    given_load: str | None
    driver_warnings: tuple[str, ...] = ()

    def warnings(self) -> list[str]:
        """What has no effect, and what works but is seldom meant."""
        return [
            *filter(None, [self.problems.warning()]),
            *self.problems.notes,
            *effect.warnings(self.args, self.explicit, given_load=self.given_load),
            *run_dir_warnings(self.args, self.given_load),
            *self.driver_warnings,
            *megatron_warnings(self.args, self.explicit),
        ]


def parse_args(
    add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None, *, argv: Sequence[str] | None = None
) -> Args:
    """Parse, derive, validate and freeze the command line.

    Args:
        add_custom_arguments: adds flags of your own to the parser (slime's win where names clash).
        argv: the command line without the program; default `sys.argv[1:]`.

    Raises:
        UsageError: with every problem that was found.
        SystemExit: after answering --help, --explain, --list-unsupported or --completion (status 0).
    """
    line, command_line = sys.argv[1:] if argv is None else argv, CommandLine(add_custom_arguments)
    if (text := command_line.answer(line)) is not None:
        sys.stdout.write(text)
        raise SystemExit(0)
    return accept(command_line.check(line))


def accept(checked: Checked) -> Args:
    """The args of a command line without problems; logs what works but is seldom meant.

    Raises:
        UsageError: with every problem of the command line.
    """
    refuse(checked.problems.all())
    for warning in checked.warnings():
        logger.warning("%s", warning)
    return checked.args


class CommandLine:
    """Checks command lines.

    Args:
        add_custom_arguments: as for `parse_args`.

    Attributes:
        parser: built once, for all lines.
    """

    def __init__(self, add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None) -> None:
        self.parser = build_parser(add_custom_arguments)

    def answer(self, argv: Sequence[str]) -> str | None:
        """The answer of a command line that asks (--help, --explain, --list-unsupported, --completion), else None.

        Raises:
            UsageError: the question cannot be answered.
        """
        tokens = with_current_names(argv, say=False)
        if any(token.split("=", 1)[0] in ask.HELP for token in tokens):
            titles = [group_title(flags_class)[0] for flags_class in _own_classes()]
            return ask.help_text(self.parser, ask.value_after(tokens, *ask.HELP), own_titles=titles)
        asked = Args()
        self.parser.parse_all(tokens, asked, explain_unknown=lambda name: None)
        if asked.completion:
            return ask.completion_script(self.parser, asked.completion)
        if asked.list_unsupported:
            return ask.refusals_text(megatron_refusals())
        if not asked.explain:
            return None
        checked = self.check(argv)
        return ask.explanation(
            self.parser,
            asked.explain,
            older_names=OLDER_NAMES,
            status_of=self.status_of,
            values=vars(checked.args),
            explicit=checked.explicit,
        )

    def status_of(self, action: argparse.Action) -> ask.FlagStatus:
        """What a flag does today."""
        kind, why = megatron_flag_class(action.option_strings[0]) or ("used", "")
        kinds = {"used": "works", "warned": "no effect here"}
        return ask.FlagStatus(kinds.get(kind, "not supported"), why)

    def check(self, argv: Sequence[str]) -> Checked:
        """Parse, derive and validate one command line (without the program's name); starts nothing."""
        tokens = with_current_names(argv)

        def explain_unknown(name: str) -> str | None:
            return explain_unknown_sglang(name) or here(name, self.parser.options())

        args, problems = Args(), Problems()
        tokens = set_aside(tokens, self.parser.options())
        line_problems = self.parser.parse_all(tokens, args, explain_unknown=explain_unknown)
        explicit = explicit_flags(self.parser, tokens)
        custom, by_role = apply_config_files(
            args, explicit, problems, options=self._options(), explain_unknown=explain_unknown
        )
        localize(args)
        problems.notes += collected(problems.wrong, go_on_after_requeue, args) or []
        resumed, unusable = collected(problems.wrong, resume_values, args) or ({}, [])
        vars(args).update(resumed)
        problems.wrong += unusable
        given_load = args.load
        _finish(args, explicit, problems, by_role)
        problems.wrong += apply_extra(args, custom)
        tool = vars(args).get("tool_function_path")
        generates, has_mcp = _generates(args).values(), vars(args).get("mcp") is not None
        problems.environment += files.check_tool_function(
            generates, tool, ToolFn, signature_problem, has_servers=has_mcp
        )
        problems.environment += check_mcp(args, generates)
        problems.wrong += files.check_settings(vars(args), _hook_defaults(), HOOKS)
        if not args.strict_flags:
            vars(args).update(problems.settle())
        for kind in (problems.wrong, problems.environment, problems.unsupported):
            kind[:] = without_repeats(kind, line_problems)
        if not args.dry_run:  # a plan can be made elsewhere, and says what it lacks
            problems.environment += problems.lacking
        problems.no_effect[:] = without_repeats(problems.no_effect, line_problems)
        problems.wrong[:0] = line_problems
        return Checked(args.freeze(), problems, frozenset(explicit), given_load)

    def _options(self) -> dict[str, argparse.Action]:
        """Every option string -> action, older names too."""
        options = self.parser.options()
        return options | {older: options[current] for older, current in OLDER_NAMES.items()}


def _own_classes() -> tuple[type, ...]:
    return (*FLAG_CLASSES, SglangFlags)


def build_parser(add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None) -> Parser:
    """The parser of a command line; help lists slime's groups first, then Megatron's, then SGLang's."""
    parser = Parser(
        prog="train.py",
        add_help=False,  # `CommandLine.answer` does it, and never ends the process
        usage="python train.py --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size N --num-rollout N [flags]",
        description="Train a language model by reinforcement learning: slime's flags, then Megatron's, then SGLang's.",
        epilog="A wrong command line ends with status 2 and one 'error:' line per problem, before anything starts.",
    )
    classes = (*FLAG_CLASSES, SglangFlags)
    # Our groups are made first (order of --help) and filled last (our flags win over the user's and Megatron's).
    groups = [parser.add_argument_group(*group_title(flags_class)) for flags_class in classes]
    groups[0].add_argument(
        *ask.HELP, nargs="?", metavar="GROUP", default=argparse.SUPPRESS, help="these flags, or those of one group"
    )
    with ThreadPoolExecutor(1) as asking:
        # The first time, another process imports SGLang to ask for its options, and this one meanwhile Megatron.
        tables = asking.submit(sglang_tables)
        add_megatron_arguments(parser)
        if add_custom_arguments is not None:
            add_custom_arguments(parser)  # it may change defaults of Megatron's
    for group, flags_class in zip(groups, classes, strict=True):
        add_flags(group, flags_class)
    add_sglang_arguments(parser, tables.result())
    return parser


def _finish(args: Args, explicit: set[str], problems: Problems, by_role: Mapping[Role, FileValues]) -> None:
    """Derive and validate, in place; what is wrong goes to `problems`."""
    given_load = args.load
    fields = [field for flags_class in _own_classes() for field in dataclasses.fields(flags_class)]
    if not args.strict_flags:
        _set_aside_pointless(args, explicit, problems, fields)
    args.accelerator = _accelerator(args, problems)
    args.train_env_vars = int4_variables(os.environ) | args.train_env_vars
    if trainer_problems := list(devices.TRAINER(args)):
        problems.wrong += trainer_problems
        args.tensor_model_parallel_size, args.sequence_parallel = 1, False
    hf_config, hf_problems = files.read_hf_config(args.hf_checkpoint)
    problems.environment += hf_problems
    _derive(args, explicit, problems, hf_config)
    problems.extend(effect.collect(args, explicit, fields))
    if not args.debug_rollout_only:  # no trainers
        _check_trainers(args.replace(load=given_load), explicit, problems, hf_config, by_role, fields)
    if not args.debug_train_only:
        problems.extend(sglang_problems(args, port_is_free=is_port_available))
        if hf_config is not None:
            synced = not args.debug_rollout_only
            problems.unsupported += served_model_problems(hf_config, args.hf_checkpoint, is_synced=synced)
            problems.wrong += draft_problems(args, args.engine_models, hf_config)
    problems.lacking += devices.MISSING_TRANSPORT(args)
    problems.notes += debug.template_notes(args)
    for option, path in _generates(args).items():
        problems.notes += files.form_notes(option, path, is_batch_generate)
    _check_rewards(args, problems)
    problems.environment += _check_environment(args, given_load=given_load, has_config=hf_config is not None)
    problems.environment += collected(problems.environment, lambda: list(check_run_dirs(args, given_load))) or []
    args.eval_prompt_data = [text for d in args.eval_datasets for text in (d.name, d.path)] or None
    del args.offload  # only a short form


def _derive(args: Args, explicit: set[str], problems: Problems, hf_config: Mapping[str, Any] | None) -> None:
    """Set what follows from the flags and from the model's config, in place."""
    values = vars(args)
    if hf_config is not None:
        if (is_fsdp := args.train_backend == "fsdp") or args.model_args_from_hf:
            from_hf = collected(problems.wrong, model_args_from_hf, hf_config, is_fsdp) or {}
        else:
            from_hf = args_implied_by_hf(hf_config, args.spec, has_latent_attention=args.multi_latent_attention)
        values.update({name: value for name, value in from_hf.items() if name not in explicit})
    problems.wrong += debug.check_deterministic(args, explicit)
    implied = debug.deterministic_values(args)
    values.update(implied)
    explicit |= set(implied)  # engines are started with what is explicit
    now = time.strftime("%Y%m%d-%H%M%S")
    if args.prompt_data and len(args.prompt_data) == 1:
        args.prompt_data = args.prompt_data[0]
    values.update(derive.derive_flags(args, explicit, kind_of=classify_checkpoint, now=now))
    if (sentence := without_deepep(args)) and not args.debug_rollout_only:
        if args.require_deepep:
            problems.environment.append(f"{sentence}, which --require-deepep refuses; install it, or leave that out.")
        else:
            problems.notes.append(f"{sentence} (--require-deepep refuses that).")
    values.update(collected(problems.wrong, derive_megatron, args) or {})
    values.update(derive_sglang(args, explicit, list(defaults_of(SglangFlags))))
    derive_engines(args, explicit, problems)
    values.update(policy_values(args, problems), eval_datasets=_eval_datasets(args, problems))
    args.prompt_sources = collected(problems.environment, prompt_sources, args) or []
    if args.num_rollout is None:
        problems.notes += files.SMALL_DATA_NOTE(args)
        args.num_rollout = derive.rollouts_of_epochs(
            args.num_epoch, num_rows=files.num_prompts(args), rollout_batch_size=args.rollout_batch_size
        )


def _check_trainers(
    args: Args,
    explicit: set[str],
    problems: Problems,
    hf_config: Mapping[str, Any] | None,
    by_role: Mapping[Role, FileValues],
    fields: effect.Fields,
) -> None:
    """What is wrong with the model, its layout and kernels, the critic and the teacher; --load is as it was given."""
    of_actor = backend_problems(args, hf_config, explicit)
    problems.extend(of_actor)
    problems.extend(problems_of_run(args, hf_config))
    if critic := critic_entry(args, by_role):
        critic_args, critic_explicit = critic
        of_critic = backend_problems(critic_args, hf_config, critic_explicit)
        of_critic.extend(effect.collect(critic_args, set(critic_explicit), fields))
        if args.train_backend == "megatron":  # no engine serves a critic
            of_critic.wrong += lora_problems(parse_megatron_role_args(args, "critic").replace(lora_serve=None))
        if not args.strict_flags:
            _settle_critic(args, of_actor, of_critic)
        problems.extend(of_critic.beside(problems, f"{roles.FLAG}, the critic's entry"))
    problems.wrong += teacher_problems(args)


def _settle_critic(args: Args, of_actor: Problems, of_critic: Problems) -> None:
    """Replace what has no effect for the critic, and keep for it what has none for the actor alone."""
    own = args.megatron_role_values["critic"]
    for name in of_actor.replaced():
        own.setdefault(name, getattr(args, name))
    own.update(of_critic.settle())


def _set_aside_pointless(args: Args, explicit: set[str], problems: Problems, fields: effect.Fields) -> None:
    """Take flags that a mode switches off from the line before anything is derived from them."""
    pointless = list(effect.check_pointless(args, explicit, fields))
    problems.wrong += pointless
    for sentence in pointless:
        vars(args).update(sentence.instead)
        explicit -= set(sentence.instead)


def _accelerator(args: Args, problems: Problems) -> str:
    """The device to run, or only to plan, on. A plan for GPUs can be made without one."""
    if args.dry_run and args.accelerator != "auto":
        return str(args.accelerator)
    return collected(problems.environment, accelerator.resolve, args.accelerator) or str(args.accelerator)


def _eval_datasets(args: Args, problems: Problems) -> list[EvalDatasetConfig]:
    raw, defaults = derive.raw_eval_datasets(args.eval_prompt_data), {}
    if args.eval_config:
        config = read_file(problems, load_eval_config, args.eval_config)
        if config is None:
            return []
        raw, defaults = config.datasets, config.defaults
        problems.wrong += [NoEffect(setting, "on an evaluation", "leave it out") for setting in config.ignored]
    return collected(problems.wrong, build_eval_dataset_configs, args, raw, defaults) or []


def _check_rewards(args: Args, problems: Problems) -> None:
    """Rewards have a grader, and it has what it reads; alarms have thresholds."""
    read_file(problems, alarm_settings, args.alarms_config)
    fields = files.fields_text(args)
    problems.wrong += generation.check_rewards(args, known=RM_TYPES, needs_label=rm_needs_label, fields=fields)
    problems.extend(data_problems(args, known=RM_TYPES, needs_label=rm_needs_label, fields=fields))
    reads_reward = generation.uses_builtin_reward(args) and args.eval_function_path == generation.DEFAULT_ROLLOUT
    problems.environment += files.check_eval_data(args, reads_reward=reads_reward)


def _check_environment(args: Args, *, given_load: str | None, has_config: bool) -> Iterator[str]:
    """What else the flags point at: checkpoints, hooks, directories."""
    if has_config:
        reads_weights = not args.debug_train_only and args.sglang_load_format != "dummy"
        needs_weights = reads_weights or args.load == args.hf_checkpoint
        yield from files.check_hf_files(args.hf_checkpoint, needs_weights=needs_weights)
    yield from files.check_checkpoints(
        load=given_load, ref_load=args.ref_load, save=args.save, teacher_load=args.opd_teacher_load
    )
    if args.check_weight_update_equal and args.hf_checkpoint:
        yield from files.check_weight_update_equal(load=args.load, hf_checkpoint=args.hf_checkpoint)
    yield from files.check_weight_dir(args.update_weight_disk_dir)
    yield from debug.check_replay(args.load_debug_rollout_data, args.start_rollout_id, args.num_rollout)
    yield from debug.MISSING_RECORDER(args)
    if not args.dry_run:  # a plan for GPUs can be made elsewhere
        yield from devices.check_memory_saver(args, os.environ)
    yield from generation.check_generation_files(args)
    yield from files.check_hooks(vars(args), _hook_defaults(), HOOKS, signature_problem)
    for where, name, path in [*_hooks_of_data(args), *reward_hooks(args)]:
        yield from files.check_hook(where, path, HOOKS[name], signature_problem)
    yield from files.check_output_dirs(files.output_dirs(args))
    yield from files.check_output_file("--ray-timeline-path", args.ray_timeline_path)


def _hook_defaults() -> dict[str, Any]:
    """Return attribute -> default. slime's own functions need no check, and every parse would pay for loading them."""
    defaults = {name: value for flags_class in FLAG_CLASSES for name, value in defaults_of(flags_class).items()}
    return defaults | {"eval_function_path": generation.DEFAULT_ROLLOUT}


def _hooks_of_data(args: Args) -> list[tuple[str, str, str]]:
    return [(f"{dataset.where}: {name}", name, path) for dataset, name, path in dataset_hooks(args)]


def _generates(args: Args) -> dict[str, str]:
    """Where it is given -> path of each generate function of the run."""
    own, name = args.custom_generate_function_path, "custom_generate_function_path"
    given = {"--custom-generate-function-path": own} if own else {}
    return given | {where: path for where, attribute, path in _hooks_of_data(args) if attribute == name}
