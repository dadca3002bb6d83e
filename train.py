"""Synchronous RL: generate a rollout, train on it, send the weights to the engines, again.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl ... (see --help, README.md and scripts/run-*.sh)

This file is the schedule; what each verb does is in slime/ray/run.py.
"""

from __future__ import annotations

import sys
from typing import Any

from slime.utils.errors import explain_missing_packages

with explain_missing_packages():
    from slime.ray.driver import drive
    from slime.ray.run import TrainingRun
    from slime.utils.errors import UsageError


def check(args: Any) -> None:
    """Refuse what only a driver that runs ahead can do; a line of a whole run may be debugged here all the same."""
    if args.debug_train_only or args.debug_rollout_only:
        return
    ahead = {"--async-buffer-size": args.async_buffer_size, "--update-weights-interval": args.update_weights_interval}
    if given := [f"{flag} {value}" for flag, value in ahead.items() if value > 1]:
        flags = " and ".join(given)
        raise UsageError(
            f"{flags}: train.py syncs the weights after every rollout; use train_async.py, or leave it out"
        )


def train(args: Any) -> None:
    """Run every rollout of `args`, one after the other."""
    with TrainingRun(args) as run:
        for attempt in run.attempts():
            with attempt:
                run.eval_before_training()
                for rollout_id in run.steps():
                    rollout = run.generate(rollout_id)
                    run.train_step(rollout_id, rollout)
                    run.save_if_due(rollout_id)
                    run.sync_weights()
                    run.eval_if_due(rollout_id)


if __name__ == "__main__":
    sys.exit(drive(train, check=check))
