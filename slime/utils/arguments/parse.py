"""From the command line to checked, frozen `Args`: where slime's, Megatron's and SGLang's flags come together.

Order: parse -> derive -> validate -> freeze. Problems of all stages are collected and raised together, before anything
starts. This is the one module of `slime.utils` that imports upwards, inside functions: the backends' `arguments`
modules, the hook Protocols and the reward names.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from slime.utils.arguments import check_files, derive, validate
from slime.utils.arguments.algorithm import AlgorithmFlags, CheckpointFlags, RewardFlags
from slime.utils.arguments.args import Args
from slime.utils.arguments.check_hooks import check_hook, check_hooks
from slime.utils.arguments.cluster import ClusterFlags
from slime.utils.arguments.data import DataFlags
from slime.utils.arguments.debug import DebugFlags
from slime.utils.arguments.eval import EvalFlags
from slime.utils.arguments.flags import Parser, add_flags, defaults_of, group_title
from slime.utils.arguments.observability import ObservabilityFlags
from slime.utils.arguments.rollout import RolloutFlags
from slime.utils.arguments.train import TrainFlags
from slime.utils.arguments.weight_sync import WeightSyncFlags
from slime.utils.checkpoint_paths import classify_checkpoint
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, load_eval_config
from slime.utils.misc import is_port_available

logger = logging.getLogger(__name__)
T = TypeVar("T")

FLAG_CLASSES: tuple[type, ...] = (
    ClusterFlags,
    CheckpointFlags,
    DataFlags,
    RolloutFlags,
    RewardFlags,
    AlgorithmFlags,
    EvalFlags,
    TrainFlags,
    WeightSyncFlags,
    ObservabilityFlags,
    DebugFlags,
)
OLDER_NAMES = {
    "--prompt-key": "--input-key",
    "--rollout-generate-func-path": "--custom-generate-function-path",
    "--reward-fn-path": "--custom-rm-path",
}
_HELP = ("-h", "--help")


def parse_args(
    add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None, *, argv: Sequence[str] | None = None
) -> Args:
    """Parse, derive, validate and freeze the command line.

    Args:
        add_custom_arguments: adds flags of your own to the parser (slime's win where names clash).
        argv: the command line without the program; default `sys.argv[1:]`.

    Raises:
        UsageError: with every problem that was found.
        SystemExit: after printing --help (status 0).
    """
    tokens = with_current_names(sys.argv[1:] if argv is None else argv)
    parser = build_parser(tokens, add_custom_arguments)
    if any(token in _HELP for token in tokens):
        parser.print_help()
        raise SystemExit(0)
    args = Args()
    line_problems = parser.parse_all(tokens, args, explain_unknown=_explain_unknown)
    given_load, check = args.load, _Checker()
    check.run(_finish, args, parser.explicit(tokens), check)
    problems = line_problems + _not_follow_ups(check.problems, line_problems)
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    for warning in validate.warnings(args, given_load=given_load):
        logger.warning("%s", warning)
    return args.freeze()


def with_current_names(tokens: Sequence[str]) -> list[str]:
    """The command line with names from older documents replaced; each use prints one line."""
    current = []
    for token in tokens:
        name, equals, value = token.partition("=")
        if name in OLDER_NAMES:
            logger.warning("%s is called %s now", name, OLDER_NAMES[name])
        current.append(OLDER_NAMES.get(name, name) + equals + value)
    return current


def build_parser(
    tokens: Sequence[str], add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None
) -> Parser:
    """The parser of a command line.

    Help lists slime's groups first, then Megatron's, then SGLang's. SGLang's own options are there only where `tokens`
    needs them, for importing it takes seconds.
    """
    import slime.backends.sglang_utils.arguments as sglang
    from slime.backends.megatron_utils.arguments import add_megatron_arguments

    parser = Parser(
        prog="train.py",
        usage="python train.py --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size N --num-rollout N [flags]",
        description="Train a language model by reinforcement learning: slime's flags, then Megatron's, then SGLang's.",
        epilog="A wrong command line ends with status 2 and one 'error:' line per problem, before anything starts.",
    )
    classes = (*FLAG_CLASSES, sglang.SglangFlags)
    # Our groups are made first (order of --help) and filled last (our flags win over the user's and Megatron's).
    groups = [parser.add_argument_group(*group_title(flags_class)) for flags_class in classes]
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    add_megatron_arguments(parser)
    for group, flags_class in zip(groups, classes, strict=True):
        add_flags(group, flags_class)
    own = [name for name in parser.options() if name.startswith(("--sglang-", "--router-"))]
    wants_all = any(token in _HELP for token in tokens) and sglang.is_installed()
    if wants_all or sglang.needs_installed_options(tokens, own):
        sglang.add_installed_arguments(parser)
    else:
        sglang.add_common_arguments(parser)
    return parser


def _explain_unknown(name: str) -> str | None:
    from slime.backends.sglang_utils.arguments import explain_owned

    return explain_owned(name)


class _Checker:
    """Collects the sentences of checks that return them and of code that raises them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def add(self, sentences: Iterable[str]) -> None:
        """Keep these sentences."""
        self.problems.extend(sentences)

    def run(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T | None:
        """Call a function; keep what its UsageError says and return None then."""
        try:
            return function(*args, **keywords)
        except UsageError as error:
            self.add(error.messages)
            return None


def _not_follow_ups(problems: list[str], line_problems: list[str]) -> list[str]:
    """Drop what is only wrong because a flag could not be parsed: sentences about a flag that an earlier one names."""
    named = {word.strip(":,.?") for line in line_problems for word in line.split() if word.startswith("--")}
    return [problem for problem in problems if not named & {word.strip(":,.?") for word in problem.split()}]


def _finish(args: Args, explicit: set[str], check: _Checker) -> None:
    """Derive and validate, in place; problems go to `check`."""
    from slime.backends.megatron_utils.arguments import derive_megatron, megatron_problems, model_args_from_hf
    from slime.backends.sglang_utils.arguments import SglangFlags, derive_sglang, sglang_problems
    from slime.utils import accelerator

    values = vars(args)
    given_load = args.load
    # An impossible --accelerator is reported, and the rest of the line is then checked as for a CPU.
    args.accelerator = check.run(accelerator.resolve, args.accelerator) or "cpu"
    if trainer_problems := list(validate.check_trainer(args)):
        check.add(trainer_problems)
        args.tensor_model_parallel_size = 1
    hf_config, hf_problems = check_files.read_hf_config(args.hf_checkpoint)
    check.add(hf_problems)
    if args.model_args_from_hf and hf_config is not None:
        from_hf = check.run(model_args_from_hf, hf_config) or {}
        values.update({name: value for name, value in from_hf.items() if name not in explicit})
    now = time.strftime("%Y%m%d-%H%M%S")
    values.update(derive.derive_flags(args, explicit, kind_of=classify_checkpoint, now=now))
    values.update(check.run(derive_megatron, args) or {})
    own = list(defaults_of(SglangFlags))
    values.update(derive_sglang(args, explicit, own))
    values["eval_datasets"] = check.run(_eval_datasets, args) or []
    fields = [field for flags_class in (*FLAG_CLASSES, SglangFlags) for field in dataclasses.fields(flags_class)]
    check.add(validate.collect(args, explicit, fields))
    check.add(megatron_problems(args.replace(load=given_load), hf_config))
    if not args.debug_train_only:
        check.add(sglang_problems(args, port_is_free=is_port_available))
    _check_environment(args, check, given_load=given_load, has_config=hf_config is not None)
    values["eval_prompt_data"] = [text for d in args.eval_datasets for text in (d.name, d.path)] or None
    del args.offload  # only a short form


def _eval_datasets(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    if args.eval_config:
        raw, defaults = load_eval_config(args.eval_config)
        return build_eval_dataset_configs(args, raw, defaults)
    return build_eval_dataset_configs(args, derive.raw_eval_datasets(args.eval_prompt_data))


def _check_environment(args: Args, check: _Checker, *, given_load: str | None, has_config: bool) -> None:
    """Everything that the flags point at: checkpoints, hooks, data, rewards, directories."""
    from slime.rollout.base_types import HOOKS, signature_problem
    from slime.rollout.rm_hub import RM_TYPES, rm_needs_label

    if has_config:
        reads_weights = not args.debug_train_only and args.sglang_load_format != "dummy"
        needs_weights = reads_weights or args.load == args.hf_checkpoint
        check.add(check_files.check_hf_files(args.hf_checkpoint, needs_weights=needs_weights))
    check.add(check_files.check_checkpoints(load=given_load, ref_load=args.ref_load, save=args.save))
    defaults = {name: value for flags_class in FLAG_CLASSES for name, value in defaults_of(flags_class).items()}
    check.add(
        check_hooks(vars(args), defaults | {"eval_function_path": validate.DEFAULT_ROLLOUT}, HOOKS, signature_problem)
    )
    for dataset in args.eval_datasets:
        for name in ("custom_rm_path", "custom_generate_function_path"):
            if path := vars(dataset)[name]:
                check.add(
                    check_hook(f"evaluation data set {dataset.name}: {name}", path, HOOKS[name], signature_problem)
                )
    reads_reward = check_files.uses_builtin_reward(args, validate.DEFAULT_ROLLOUT)
    check.add(check_files.check_rm_type(args.rm_type, "--rm-type", rm_url=args.rm_url, known=RM_TYPES))
    check.add(check_files.check_train_data(args, reads_reward=reads_reward, needs_label=rm_needs_label))
    check.add(
        check_files.check_eval_data(
            args.eval_datasets,
            reads_reward=reads_reward,
            rm_type=args.rm_type,
            custom_rm_path=args.custom_rm_path,
            rm_url=args.rm_url,
            known=RM_TYPES,
            needs_label=rm_needs_label,
        )
    )
    check.add(check_files.check_tensorboard(args.use_tensorboard, args.tb_project_name, os.environ))
    check.add(check_files.check_template("--save-hf", args.save_hf, needs_id=False))
    check.add(
        check_files.check_template("--save-debug-rollout-data", args.save_debug_rollout_data, needs_id=True),
    )
    check.add(check_files.check_output_dirs(_outputs(args)))


def _outputs(args: Args) -> dict[str, str | None]:
    """option -> directory that the run will write."""
    return {
        "--save": args.save,
        "--output-dir": args.output_dir if args.output_dir != args.save else None,
        "--save-hf": _fixed_parent(args.save_hf),
        "--save-debug-rollout-data": _fixed_parent(args.save_debug_rollout_data),
        "--wandb-dir": args.wandb_dir,
        "--tb-project-name": args.tb_project_name,
    }


def _fixed_parent(template: str | None) -> str | None:
    """The directory part of a path template that is the same for every rollout."""
    return None if template is None else template.split("{", 1)[0].rpartition("/")[0] or "."
