"""Synchronous RL: generate a rollout, train on it, send the weights to the engines, again.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl ... (see --help, README.md and scripts/run-*.sh)

This file is the schedule; what each verb does is in slime/ray/run.py.
"""

from __future__ import annotations

import sys
from typing import Any

from slime.ray.driver import drive
from slime.ray.run import TrainingRun


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
    sys.exit(drive(train))
