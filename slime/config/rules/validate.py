"""All rules that flag values have to keep, and what works but is seldom meant.

The rules themselves are in the other modules of this package: each reads `args` after derivation and returns
sentences that name the value, the flag and the remedy. A module's CHECKS find contradictions, its UNSUPPORTED what is
not built yet. All always run, so that one error lists everything. Files, ports and hooks are judged elsewhere
(files.py, hooks.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args
from slime.config.parser import option_name
from slime.config.problems import Check, Problems, Rule, broken
from slime.config.rules import batch, debug, devices, generation, losses
from slime.config.rules.effect import (
    Fields,
    check_needs,
    check_offload_forms,
    check_pointless,
    without_effect,
)
from slime.utils.checkpoint_paths import classify_checkpoint

CHECKS: tuple[Check, ...] = (
    *batch.CHECKS,
    *devices.DEVICE_CHECKS,
    *losses.ASYNC_CHECKS,
    *losses.LOSS_CHECKS,
    *generation.ROLLOUT_CHECKS,
    *debug.CHECKS,
    *generation.GENERATION_CHECKS,
    *devices.TRAINER_CHECKS,
)
UNSUPPORTED: tuple[Check, ...] = (*losses.UNSUPPORTED, *generation.UNSUPPORTED)


def collect(args: Args, explicit: set[str], fields: Fields) -> Problems:
    """The sentences of all rules, in order.

    Args:
        explicit: attributes whose flags are on the command line.
        fields: the dataclass fields of slime's flags.
    """
    wrong = list(broken(CHECKS, args))
    wrong += devices.check_nodes(args, explicit)
    wrong += check_offload_forms(args, explicit)
    for check in (check_range, check_needs, check_pointless):
        wrong += check(args, explicit, fields)
    return Problems(wrong=wrong, unsupported=list(broken(UNSUPPORTED, args)))


def check_range(args: Args, explicit: set[str], fields: Fields) -> Iterable[str]:
    """Every given number is finite, and neither smaller nor larger than makes sense."""
    for field in fields:
        value, least, most = vars(args)[field.name], field.metadata["at_least"], field.metadata["at_most"]
        if field.name not in explicit or value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{option_name(field)} {value} is no finite number."
        if least is not None and value < least:
            yield f"{option_name(field)} {value} must be at least {least}."
        if most is not None and value > most:
            yield f"{option_name(field)} {value} must be at most {most}."


def _trains_policy(args: Args) -> bool:
    return args.loss_type == "policy_loss" and not args.debug_train_only and not args.eval_only


WARNINGS: tuple[Check, ...] = (
    losses.IN_FLIGHT_WARNING,
    Rule(
        lambda a: not a.debug_rollout_only and classify_checkpoint(a.load) != "megatron",
        "--ckpt-step {ckpt_step} has no effect: what is loaded, {load}, is no Megatron checkpoint with iterations.",
        given="ckpt_step",
    ),
    Rule(
        lambda a: (
            a.n_samples_per_prompt == 1
            and a.rewards_normalization
            and ESTIMATORS[a.advantage_estimator].compares_groups
            and _trains_policy(a)
        ),
        "--n-samples-per-prompt 1: a group of one minus its mean is 0, so nothing is learned; use more, or "
        "--disable-rewards-normalization.",
    ),
    Rule(
        lambda a: a.rollout_min_new_tokens and _trains_policy(a),
        "--rollout-min-new-tokens {rollout_min_new_tokens}: up to there the engine samples without the end token, but "
        "the trainer's log-probs count it in, so the two differ by its probability.",
    ),
    Rule(
        lambda a: ESTIMATORS[a.advantage_estimator].loss == "cispo" and a.eps_clip < 1,
        "--advantage-estimator {advantage_estimator} with --eps-clip {eps_clip} also bounds the ratio from below, "
        "which CISPO does not; give --eps-clip 1 or more to turn that off.",
    ),
)


def warnings(args: Args, explicit: Collection[str], *, given_load: str | None) -> Iterable[str]:
    """What works but is seldom meant.

    Args:
        explicit: attributes whose flags are on the command line.
        given_load: --load before derivation.
    """
    yield from without_effect(args, explicit)
    yield from losses.without_effect(args, explicit)
    if given_load not in (None, args.load, args.save):
        yield f"--load {given_load} has no checkpoint: training starts from {args.load}."
    yield from broken(WARNINGS, args, explicit)
