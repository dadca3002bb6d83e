"""--deterministic: what it sets, and what cannot be repeated bit for bit.

What a user's own functions do is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.problems import Rule, each, where

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
    if not args.deterministic or args.save is None:
        return
    if args.update_weights_interval > 1:
        yield (
            f"--deterministic with {because} and --save needs --update-weights-interval 1, not "
            f"{args.update_weights_interval}: a run that is resumed begins with the weights of its checkpoint, which "
            "engines of the run before did not have yet."
        )
    for flag, is_set in (
        ("--exit-signal-handler", args.exit_signal_handler),
        ("--exit-duration-in-mins", args.exit_duration_in_mins is not None),
    ):
        if is_set:
            yield (
                f"--deterministic with {because} does not go with {flag}: it saves a rollout behind which others are "
                "begun already, and a resumed run begins them with newer weights; leave one of the two out."
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
