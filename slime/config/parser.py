"""Turns a dataclass of flags into a group of command-line options, and holds the parser of the whole command line.

A field is one flag: its name is the attribute of `args`, its annotation the type, `flag(...)` the default and the help
line. The parser differs from argparse's in that it never exits: every problem of a command line becomes a sentence,
and all of them are returned together. It knows neither which flags exist nor what a value means.

At the end, other names of our flags: older ones, and what other trainers (verl, TRL, OpenRLHF) call what they do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from slime.utils.errors import nearest

logger = logging.getLogger(__name__)


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    nargs: str | None = None,
    repeatable: bool = False,
    is_json: bool = False,
    option: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    needs: str | Sequence[str] = (),
) -> Any:
    """One flag, as a dataclass field.

    Args:
        default: value when the flag is absent. A bool field that is True by default becomes a `--disable-<name>`
        switch.
        help: one line for `--help`.
        choices, nargs: as for argparse.
        repeatable: the flag may be given several times; the values make a list.
        is_json: the value is a JSON text.
        option: the option's name where it is not `--<field-name>`.
        at_least, at_most: smallest and largest value that makes sense.
        needs: attributes of which one must be set for this flag to have an effect; "attribute=value": must be that;
            "attribute.fact": its value must name a row of a table of which that is true.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "nargs": nargs,
        "repeatable": repeatable,
        "is_json": is_json,
        "option": option,
        "at_least": at_least,
        "at_most": at_most,
        "needs": (needs,) if isinstance(needs, str) else tuple(needs),
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_name(field: dataclasses.Field[Any]) -> str:
    """The command-line name of a field: `--<name>`, or `--disable-<name>` for a bool that is True by default."""
    if field.metadata["option"]:
        return str(field.metadata["option"])
    name = field.name.replace("_", "-")
    return f"--disable-{name}" if field.default is True else f"--{name}"


def group_title(flags_class: type) -> tuple[str, str | None]:
    """(title, description) of a class of flags: the first sentence of its docstring, and the rest of that line."""
    line = (flags_class.__doc__ or flags_class.__name__).strip().splitlines()[0]
    title, _, description = line.partition(". ")
    return title.rstrip("."), description or None


def add_flags(group: argparse._ArgumentGroup | argparse.ArgumentParser, flags_class: type) -> None:
    """Add one option per field of a dataclass of flags."""
    hints, defaults = typing.get_type_hints(flags_class), defaults_of(flags_class)
    for field in dataclasses.fields(flags_class):
        keywords = _argparse_keywords(field.metadata, hints[field.name], defaults[field.name])
        group.add_argument(option_name(field), dest=field.name, help=field.metadata["help"], **keywords)


def defaults_of(flags_class: type) -> dict[str, Any]:
    """attribute -> default of a class of flags (fresh lists and dicts)."""
    return {field.name: default_of(field) for field in dataclasses.fields(flags_class)}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of one flag (a fresh list or dict)."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _argparse_keywords(meta: Mapping[str, Any], hint: Any, default: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = {"default": default}
    if meta["is_json"]:
        return keywords | {"type": json_object if dict in _kinds_of(hint) else json_value}
    kinds = _kinds_of(hint)
    if kinds == [bool] and default is None:
        return keywords | {"action": argparse.BooleanOptionalAction}
    if kinds == [bool]:
        return keywords | {"action": "store_false" if default else "store_true"}
    keywords |= {"type": kinds[0], "choices": meta["choices"], "nargs": meta["nargs"]}
    return keywords | {"action": "append"} if meta["repeatable"] else keywords


def _kinds_of(hint: Any) -> list[type]:
    """The types of one value inside `int`, `int | None`, `list[str] | None`, `dict[str, Any]`, ..."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (typing.Union, list):
        return [kind for part in typing.get_args(hint) if part is not type(None) for kind in _kinds_of(part)]
    return [typing.get_origin(hint) or hint]


def json_value(text: str) -> Any:
    """Read a flag's JSON text; argparse turns the ValueError of a malformed one into an error that names the flag."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error.msg} at column {error.colno}") from error


def json_object(text: str) -> dict[str, Any]:
    """As `json_value`, for a flag whose value is an object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, as in '{{\"key\": 1}}'")
    return value


_METAVARS = {
    "json_value": "JSON",
    "json_object": "JSON",
    "loads": "JSON",
    "nullable_str": "STR",
    "human_readable_int": "INT",
}


class HelpFormatter(argparse.HelpFormatter):
    """Help with one column of flags as wide as the terminal allows, types as placeholders, and defaults shown."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        name = getattr(action.type, "__name__", "str")
        return _METAVARS.get(name, name.upper())

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        shown = action.default not in (None, False, argparse.SUPPRESS, [], {}) and action.nargs != 0
        if text and shown and "default" not in text.lower():
            text += " (default: %(default)s)"
        return text


class _ParseStopped(Exception):
    """Raised where argparse would print its usage and exit."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that reports all problems instead of exiting at the first."""

    def __init__(self, **keywords: Any) -> None:
        # "resolve": a flag that is added again takes the place of the earlier one, so what is added last (slime's own)
        # wins.
        super().__init__(
            allow_abbrev=False,
            exit_on_error=False,
            conflict_handler="resolve",
            formatter_class=HelpFormatter,
            **keywords,
        )

    def error(self, message: str) -> typing.NoReturn:
        """Raise instead of printing and exiting."""
        raise _ParseStopped(message)

    def options(self) -> dict[str, argparse.Action]:
        """Every option string of this parser -> its action."""
        return {name: action for action in self._actions for name in action.option_strings}

    def parse_all(
        self, tokens: Sequence[str], namespace: Any, *, explain_unknown: Callable[[str], str | None]
    ) -> list[str]:
        """Parse into `namespace` and return one sentence per problem.

        Problems are unknown flags, missing values, wrong types and stray values; what is right is parsed all the same.

        Args:
            explain_unknown: gives the sentence for an unknown flag that deserves another than "did you mean".
        """
        tokens = list(tokens)
        problems: list[str] = []
        extras: list[str] = []
        while True:
            try:
                _, extras = self.parse_known_args(tokens, namespace)
                break
            except argparse.ArgumentError as error:
                names = (error.argument_name or "").split("/")
                problems.append(f"{names[0]}: {error.message}")
                shorter = _without(tokens, names)
            except _ParseStopped as error:
                problems.append(str(error))
                shorter = tokens
            if len(shorter) == len(tokens):
                return problems
            tokens = shorter
        return problems + list(self._explain_extras(tokens, extras, explain_unknown))

    def _explain_extras(
        self, tokens: list[str], extras: list[str], explain_unknown: Callable[[str], str | None]
    ) -> Iterable[str]:
        known, flag, strays = self.options(), "", Counter(extras)
        behind: list[str] = []  # the flag that each token stands behind, or is
        for token in tokens:
            flag = token.split("=", 1)[0] if token.startswith("--") else flag
            behind.append(flag)
        # A value of an unknown flag is no problem of its own, nor is an equal one of a flag that is known.
        strays -= Counter(token for token, flag in zip(tokens, behind, strict=True) if flag and flag not in known)
        for token, flag in zip(tokens, behind, strict=True):
            name = token.split("=", 1)[0]
            if token.startswith("--") and token in extras:
                yield explain_unknown(name) or self.did_you_mean(name)
            elif not token.startswith("--") and strays[token] and (not flag or flag in known):
                strays[token] -= 1
                yield (
                    explain_unknown(name)
                    or f"{token!r} belongs to no flag; write the flag's name before it, and quote a value with spaces."
                )

    def did_you_mean(self, name: str) -> str:
        """The sentence for an unknown flag, with the nearest names that exist."""
        near = nearest(name, self.options())
        return f"unknown flag {name}: " + (
            f"did you mean {' or '.join(near)}?" if near else "see --help for all flags."
        )


def explicit_flags(parser: argparse.ArgumentParser, tokens: Sequence[str]) -> set[str]:
    """The attributes whose flags appear on the command line (a flag without effect has none)."""
    options = {name: action.dest for action in parser._actions for name in action.option_strings}
    return {options[name] for token in tokens if (name := token.split("=", 1)[0]) in options} - {argparse.SUPPRESS}


def _without(tokens: list[str], names: list[str]) -> list[str]:
    """Drop the last use of an option, with its values, so that the rest of the line can be checked too."""
    for start in range(len(tokens) - 1, -1, -1):
        if tokens[start].split("=", 1)[0] in names:
            end = start + 1
            while end < len(tokens) and not tokens[end].startswith("--"):
                end += 1
            return tokens[:start] + tokens[end:]
    return tokens


OLDER_NAMES = {
    "--prompt-key": "--input-key",
    "--rollout-generate-func-path": "--custom-generate-function-path",
    "--reward-fn-path": "--custom-rm-path",
}
CRITIC = "--megatron-config-path, with an entry of the role critic (docs/ppo.md)"
HERE = {
    "learning-rate": "--lr",
    "actor-learning-rate": "--lr",
    "actor-lr": "--lr",
    "critic-lr": CRITIC,
    "critic-learning-rate": CRITIC,
    "critic.optim.lr": CRITIC,
    "lr-scheduler-type": "--lr-decay-style",
    "lr-scheduler": "--lr-decay-style",
    "warmup-style": "--lr-decay-style",
    "warmup-steps": "--lr-warmup-iters",
    "lr-warmup-steps": "--lr-warmup-iters",
    "warmup-ratio": "--lr-warmup-fraction",
    "lr-warmup-ratio": "--lr-warmup-fraction",
    "lr-warmup-steps-ratio": "--lr-warmup-fraction",
    "max-grad-norm": "--clip-grad",
    "grad-clip": "--clip-grad",
    "max-norm": "--clip-grad",
    "l2": "--weight-decay",
    "gradient-checkpointing": "--recompute-granularity",
    "enable-gradient-checkpointing": "--recompute-granularity",
    "model": "--hf-checkpoint",
    "model.path": "--hf-checkpoint",
    "model-name-or-path": "--hf-checkpoint",
    "model-path": "--hf-checkpoint",
    "pretrain": "--hf-checkpoint",
    "ref-pretrain": "--ref-load",
    "ref-model": "--ref-load",
    "remote-rm-url": "--rm-url",
    "reward-pretrain": "--custom-rm-path",
    "reward-fn": "--custom-rm-path",
    "reward-funcs": "--custom-rm-path",
    "custom-reward-function.path": "--custom-rm-path",
    "dataset": "--prompt-data",
    "dataset-name": "--prompt-data",
    "train-files": "--prompt-data",
    "train-data": "--prompt-data",
    "val-files": "--eval-prompt-data",
    "eval-dataset": "--eval-prompt-data",
    "eval-data": "--eval-prompt-data",
    "reward-fn-key": "--rm-type",
    "train-batch-size": "--rollout-batch-size (prompts per rollout) and --global-batch-size (samples per train step)",
    "ppo-mini-batch-size": "--global-batch-size (samples per train step)",
    "mini-batch-size": "--global-batch-size (samples per train step)",
    "per-device-train-batch-size": "--micro-batch-size",
    "micro-train-batch-size": "--micro-batch-size",
    "micro-rollout-batch-size": "--log-probs-max-tokens-per-gpu",
    "ppo-micro-batch-size-per-gpu": "--micro-batch-size",
    "ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "use-dynamic-bsz": "--use-dynamic-batch-size",
    "num-generations": "--n-samples-per-prompt",
    "rollout.n": "--n-samples-per-prompt",
    "temperature": "--rollout-temperature",
    "top-p": "--rollout-top-p",
    "top-k": "--rollout-top-k",
    "prompt-max-len": "--rollout-max-prompt-len",
    "max-prompt-length": "--rollout-max-prompt-len",
    "generate-max-len": "--rollout-max-response-len",
    "max-new-tokens": "--rollout-max-response-len",
    "max-completion-length": "--rollout-max-response-len",
    "max-response-length": "--rollout-max-response-len",
    "response-length": "--rollout-max-response-len",
    "num-train-epochs": "--num-epoch",
    "num-episodes": "--num-epoch",
    "max-epochs": "--ppo-epochs",
    "total-epochs": "--num-epoch",
    "max-steps": "--num-rollout",
    "total-training-steps": "--num-rollout",
    "beta": "--kl-loss-coef",
    "init-kl-coef": "--kl-coef",
    "kl-ctrl.kl-coef": "--kl-coef",
    "epsilon": "--eps-clip",
    "cliprange": "--eps-clip",
    "clip-ratio": "--eps-clip",
    "clip-ratio-low": "--eps-clip",
    "epsilon-high": "--eps-clip-high",
    "clip-ratio-high": "--eps-clip-high",
    "clip-ratio-c": "--eps-clip-c",
    "cliprange-value": "--value-clip",
    "entropy-coeff": "--entropy-coef",
    "entropy-loss-coef": "--entropy-coef",
    "lam": "--lambd",
    "gae-lambda": "--lambd",
    "adv-estimator": "--advantage-estimator",
    "algorithm": "--advantage-estimator",
    "zero-stage": "--tensor-model-parallel-size, --pipeline-model-parallel-size and --use-distributed-optimizer",
    "vllm-gpu-memory-utilization": "--sglang-mem-fraction-static",
    "gpu-memory-utilization": "--sglang-mem-fraction-static",
    "vllm-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "rollout.tensor-model-parallel-size": "--rollout-num-gpus-per-engine",
    "vllm-num-engines": "--rollout-num-gpus",
    "colocate-all-models": "--colocate",
    "n-gpus-per-node": "--actor-num-gpus-per-node",
    "nnodes": "--actor-num-nodes",
    "eval-steps": "--eval-interval",
    "test-freq": "--eval-interval",
    "save-steps": "--save-interval",
    "save-freq": "--save-interval",
    "save-total-limit": "--keep-checkpoints",
    "max-ckpt-num": "--keep-checkpoints",
    "save-path": "--save",
    "ckpt-path": "--save",
    "default-local-dir": "--save",
    "resume-from-checkpoint": "--resume",
    "load-checkpoint": "--resume auto",
    "resume-mode": "--resume",
    "report-to": "--tracker",
    "project-name": "--wandb-project",
    "experiment-name": "--wandb-group",
    "run-name": "--wandb-group",
}
"""Name without its leading dashes, "-" for "_", or the end of a dotted one -> what to write here."""


def here(name: str, known: Collection[str]) -> str | None:
    """The sentence about another trainer's name of a flag; None where it is no such name.

    Args:
        name: "--learning_rate", or a dotted one: "actor_rollout_ref.actor.optim.lr".
        known: every flag that there is.

    Example:
        >>> here("--learning_rate", ["--lr"])
        'unknown flag --learning_rate: that is --lr here.'
    """
    parts = name.lstrip("-").replace("_", "-").split(".")
    for start in range(len(parts)):
        rest = ".".join(parts[start:])
        if flag := HERE.get(rest) or (f"--{rest}" if len(parts) > 1 and f"--{rest}" in known else None):
            return f"unknown flag {name}: that is {flag} here."
    return None


def with_current_names(tokens: Sequence[str], *, say: bool = True) -> list[str]:
    """The command line with names from older documents replaced; each use prints one line (unless `say` is False)."""
    current = []
    for token in tokens:
        name, equals, value = token.partition("=")
        if say and name in OLDER_NAMES:
            logger.warning("%s is called %s now", name, OLDER_NAMES[name])
        current.append(OLDER_NAMES.get(name, name) + equals + value)
    return current
