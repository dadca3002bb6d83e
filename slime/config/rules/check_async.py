"""Rules of generating ahead of the trainer, and of weight syncs with requests in flight.

Each check reads `args` after derivation and returns sentences; it opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.rules.check_losses import check_nucleus


def check_fully_async(args: Args) -> Iterable[str]:
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


def check_in_flight(args: Args) -> Iterable[str]:
    """Colocated engines are idle when they get weights."""
    if args.update_weights_in_flight and args.colocate and not keeps_requests_in_flight(args.rollout_function_path):
        yield "--update-weights-in-flight and --colocate exclude each other: no request is in flight then; keep one."


def check_old_actor(args: Args) -> Iterable[str]:
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


def in_flight_warnings(args: Args) -> Iterable[str]:
    """What a sync with requests in flight costs."""
    if args.update_weights_in_flight:
        yield (
            "requests stay in flight during weight syncs: engines run with --sglang-disable-radix-cache, because "
            "SGLang cannot forget what old weights computed then; --no-update-weights-in-flight aborts them instead."
        )


CORRECTIONS = ("use_rollout_logprobs", "use_tis", "keep_old_actor")
"""Flags that correct the policy loss for the age of the weights that generated; the first is the best measured one.

OPSM is not one: without another it compares the trainer's log-probs with themselves (docs/off_policy.md).
"""


def correction_warnings(args: Args) -> Iterable[str]:
    """Rollouts ahead are of older weights; without a correction, the loss takes their tokens for the trainer's."""
    is_fresh = args.max_weight_staleness == 0 and args.update_weights_interval == 1
    trains = not (args.debug_rollout_only or args.debug_train_only or args.eval_only)
    if is_fresh or not trains or args.loss_type != "policy_loss" or any(vars(args)[name] for name in CORRECTIONS):
        return
    usable = ["--" + name.replace("_", "-") for name in CORRECTIONS if not _refusals(args, name)]
    remedy = f"give {usable[0]}" if usable else "give --max-weight-staleness 0 and --update-weights-interval 1"
    others = f" (or {' or '.join(usable[1:])})" if usable[1:] else ""
    yield (
        "train_async.py trains on responses of older weights as if the trainer's had written them, which costs "
        f"accuracy and may end in a collapse: {remedy}{others}; docs/off_policy.md compares them."
    )


def _refusals(args: Args, name: str) -> list[str]:
    """Why a correction could not be added to a command line."""
    changed = Args.of(vars(args) | {name: True})
    return [*check_old_actor(changed), *check_nucleus(changed)]


CHECKS = (check_fully_async, check_in_flight, check_old_actor)
