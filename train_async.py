"""Rollouts ahead: while the trainer trains on one, the engines already generate the next ones.

    python train_async.py ... --use-rollout-logprobs
                              (the flags of train.py, without --colocate, and --update-weights-interval,
                               --async-buffer-size, --max-weight-staleness)

At most --async-buffer-size rollouts are begun ahead of the one that is trained, and none that would be trained more
than --max-weight-staleness versions after it was begun. Wait graph of the loop:
    consumes         rollout `id`, generated while earlier ones were trained
    waits for        before a weight sync: the evaluation, and every rollout that was begun, because no request may be
                     in flight while weights change. With --update-weights-in-flight (the fully async rollout) only
                     for the evaluation: engines put requests aside for the sync and go on with them after it. With
                     --deterministic a rollout behind one that is saved waits for the sync between them
    unblocks         by the sync: rollouts that --max-weight-staleness held back

The loss needs a correction for tokens of older weights, such as --use-rollout-logprobs; without one this warns.

Evaluation runs beside training and generation. It sees one version of the weights: it begins right after a sync (or
between two) and the next sync waits for its end. It is logged at the step at which it began.
"""

from __future__ import annotations

import sys
from typing import Any

from slime.utils.errors import explain_missing_packages

with explain_missing_packages():
    from slime.config.rules.debug import check_ahead
    from slime.config.rules.losses import correction_warnings
    from slime.ray.driver import drive
    from slime.ray.run import TrainingRun
    from slime.ray.schedule import RolloutsAhead
    from slime.utils.errors import UsageError


def check(args: Any) -> None:
    """Refuse what cannot run ahead."""
    if args.colocate:
        raise UsageError("--colocate: train_async.py uses trainer and engines at once; drop it, or use train.py")
    if args.release_train:
        raise UsageError("--release-train: train_async.py trains while engines generate; drop it, or use train.py")
    if problems := list(check_ahead(args, because="train_async.py")):
        raise UsageError(problems)


def train(args: Any) -> None:
    """Run every rollout of `args`, generating ahead of the one being trained."""
    with TrainingRun(args, sync_interval=args.update_weights_interval) as run:
        for attempt in run.attempts():
            with attempt:
                run.eval_before_training()
                ahead = RolloutsAhead(run, args.async_buffer_size)
                for rollout_id in run.steps():
                    rollout = ahead.take(rollout_id)
                    run.train_step(rollout_id, rollout)
                    run.save_if_due(rollout_id)
                    if run.sync_is_due(rollout_id):
                        run.finish_eval()
                        if not args.update_weights_in_flight:
                            ahead.drain()
                        run.sync_weights()
                    run.start_eval_if_due(rollout_id)
                run.finish_eval()


if __name__ == "__main__":
    sys.exit(drive(train, check=check, warn=correction_warnings))
