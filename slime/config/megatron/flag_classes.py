"""What each of Megatron's options does here, from the table in megatron_flags.py: its class, warnings and refusals."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from slime.config.args import Args
from slime.config.megatron.config_flags import add_config_flags
from slime.config.megatron.megatron_flags import (
    ALWAYS,
    NO_BOUND,
    SLIMES,
    TABLE,
    Group,
    Kind,
)
from slime.config.megatron.parser_flags import add_parser_flags

# Values of options that are used: option -> {value: reason}
REFUSED_VALUES: dict[str, dict[Any, str]] = {
    "--normalization": {"LayerNorm": "no family of docs/model_families.md has it; use RMSNorm"},
    "--position-embedding-type": {
        "mrope": "on text it is the same as rope, and images are not trained on; use rope",
        **dict.fromkeys(
            ("learned_absolute", "relative", "none"), "no family of docs/model_families.md has it; use rope"
        ),
    },
    "--optimizer": {
        "dist_muon": "it requires the library emerging_optimizers, which slime does not install; use muon with "
        "--train-backend fsdp, whose optimizer is sharded",
    },
    "--attention-backend": {"local": "it does not know packed samples; use unfused or auto"},
    "--transformer-impl": {"inference_optimized": "slime trains the model; use local"},
    "--exp-avg-dtype": dict.fromkeys(
        ("fp16", "fp8"), "only TransformerEngine scales moments of so small a range; use bf16 or fp32"
    ),
    "--ckpt-format": dict.fromkeys(
        ("torch", "zarr", "torch_dcp", "fsdp_dtensor"), "slime's checkpoints are torch_dist"
    ),
    "--dist-ckpt-format": {"zarr": "slime's checkpoints are torch_dist"},
}
# Values that say the same as leaving a refused option out.
SAME_AS_DEFAULT: dict[str, tuple[Any, ...]] = {
    "--num-virtual-stages-per-pipeline-rank": (1,),
    "--moe-z-loss-coeff": (0,),
    "--moe-token-drop-policy": ("probs",),
}


@functools.cache
def groups_by_option() -> dict[str, Group]:
    """option -> its row of the table."""
    return {option: group for group in TABLE for option in group.options.split()}


@functools.cache
def registered() -> dict[str, argparse.Action]:
    """First name of each of Megatron's options -> its action, in the order of --help."""
    parser = argparse.ArgumentParser(add_help=False)
    add_parser_flags(parser)
    add_config_flags(parser)
    return {action.option_strings[0]: action for action in parser._actions}


def option_of(attribute: str) -> str:
    """The option string of one of Megatron's attributes; for any other, its name as an option."""
    return _options_by_attribute().get(attribute, "--" + attribute.replace("_", "-"))


@functools.cache
def _options_by_attribute() -> dict[str, str]:
    found: dict[str, str] = {}
    for option, action in registered().items():
        if option == "--" + action.dest.replace("_", "-"):  # an older name may stand before it
            found[action.dest] = option
        elif action.nargs != 0 or action.const in (True, False):  # not the short forms of other options
            found.setdefault(action.dest, option)
    return found


def megatron_flag_class(option: str) -> tuple[Kind, str] | None:
    """(class, reason) of one of Megatron's options; None for any other option, slime's own included."""
    for first, action in registered().items():
        if option in action.option_strings and first not in SLIMES:
            group = groups_by_option()[first]
            return group.kind, group.reason
    return None


def megatron_refusals() -> Iterator[tuple[Sequence[str], str]]:
    """Yield (options, or one with a value; why a run refuses them), in the order of the tables."""
    for group in TABLE:
        if group.kind == "refused":
            yield group.options.split(), group.reason
    for option, reasons in REFUSED_VALUES.items():
        for value, reason in reasons.items():
            yield [f"{option} {value}"], reason


def megatron_warnings(args: Args, explicit: Collection[str]) -> list[str]:
    """Return one sentence that names every given option without an effect here, or an empty list.

    An option that asks for what is so anyway is not named: nothing would differ if it had an effect.

    Args:
        args: parsed flags.
        explicit: attributes whose flags are on the command line.
    """
    given: dict[str, list[str]] = {}
    for option, action in registered().items():
        group = groups_by_option().get(option)
        if group is None or group.kind != "warned" or group.reason in (ALWAYS, NO_BOUND):
            continue
        if action.dest in explicit and vars(args)[action.dest] != action.default:
            given.setdefault(group.reason, []).append(option)
    if not given:
        return []
    return ["accepted, without effect: " + "; ".join(f"{', '.join(o)} ({why})" for why, o in given.items()) + "."]


def refused_flags(args: Args, derived: Collection[str] = ()) -> list[str]:
    """Return one sentence for each group of refused options that have another value than their default.

    Args:
        args: parsed flags, before or after derivation.
        derived: attributes that were not given but derived; they are left alone.
    """
    found: dict[str, list[str]] = {}
    for option, action in registered().items():
        group, value = groups_by_option().get(option), vars(args).get(action.dest, action.default)
        if group is None or value == action.default or (group.kind == "refused" and action.dest in derived):
            continue
        if group.kind == "refused" and value not in SAME_AS_DEFAULT.get(option, ()):
            found.setdefault(group.reason, []).append(_shown(option, value))
        elif not isinstance(value, list) and value in REFUSED_VALUES.get(option, {}):
            found.setdefault(REFUSED_VALUES[option][value], []).append(_shown(option, value))
    return [
        f"{', '.join(options)} {'is' if len(options) == 1 else 'are'} not supported: {reason}; leave "
        f"{'it' if len(options) == 1 else 'them'} out."
        for reason, options in found.items()
    ]


def _shown(option: str, value: Any) -> str:
    text = "" if isinstance(value, bool) else f" {value}"
    return option + (text if len(text) <= 40 else text[:36] + " ...")


def fields_without_effect() -> frozenset[str]:
    """Attributes of warned options that are not passed on to Megatron's configs."""
    groups = groups_by_option().items()
    ignored = [option for option, group in groups if group.kind == "warned" and group.reason != ALWAYS]
    return frozenset(registered()[option].dest for option in ignored)
