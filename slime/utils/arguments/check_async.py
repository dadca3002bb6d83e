"""Rules of generating ahead of the trainer, and of weight syncs with requests in flight.

Each check reads `args` after derivation and returns sentences; it opens no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from slime.utils.arguments.derive import keeps_requests_in_flight


def check_fully_async(args: argparse.Namespace) -> Iterable[str]:
    """Engines that never pause have GPUs of their own, and can take groups back."""
    if not keeps_requests_in_flight(args.rollout_function_path):
        return
    path = args.rollout_function_path
    if args.colocate:
        yield f"--rollout-function-path {path} generates while the trainer trains; drop --colocate."
    if args.data_source_path.replace(":", ".") == "slime.rollout.data_source.RolloutDataSource":
        yield (
            f"--rollout-function-path {path} gives groups back to the data source, and --data-source-path "
            f"{args.data_source_path} takes none; use slime.rollout.data_source.RolloutDataSourceWithBuffer."
        )


def check_in_flight(args: argparse.Namespace) -> Iterable[str]:
    """Colocated engines are idle when they get weights."""
    if args.update_weights_in_flight and args.colocate and not keeps_requests_in_flight(args.rollout_function_path):
        yield "--update-weights-in-flight and --colocate exclude each other: no request is in flight then; keep one."


def check_old_actor(args: argparse.Namespace) -> Iterable[str]:
    """The weights of --keep-old-actor are those of one version, so the trained tokens of a rollout are of one."""
    if not args.keep_old_actor:
        return
    if keeps_requests_in_flight(args.rollout_function_path):
        yield (
            f"--keep-old-actor does not go with --rollout-function-path {args.rollout_function_path}, whose rollouts "
            "mix weight versions; use --use-tis or --use-rollout-logprobs there."
        )
    elif args.update_weights_in_flight:
        yield (
            "--keep-old-actor does not go with --update-weights-in-flight, with which one response is of several "
            "weight versions; leave one of them out."
        )
    if args.partial_rollout and not args.mask_offpolicy_in_partial_rollout:
        yield (
            "--keep-old-actor with --partial-rollout needs --mask-offpolicy-in-partial-rollout: resumed responses "
            "have tokens of older weight versions, which must not be trained."
        )


def in_flight_warnings(args: argparse.Namespace) -> Iterable[str]:
    """What a sync with requests in flight costs."""
    if args.update_weights_in_flight:
        yield (
            "requests stay in flight during weight syncs: engines run with --sglang-disable-radix-cache, because "
            "SGLang cannot forget what old weights computed then; --no-update-weights-in-flight aborts them instead."
        )


CHECKS = (check_fully_async, check_in_flight, check_old_actor)
