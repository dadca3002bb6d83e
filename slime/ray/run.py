"""TrainingRun: the verbs of a training run, shared by train.py and train_async.py, which differ only in their order.

It is the one writer of metrics: the manager and the trainers return records, which are logged here. How it starts and
ends is in slime.ray.lifetime.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from slime.config.derive import keeps_requests_in_flight
from slime.observability import logging_utils
from slime.observability.phases import phase
from slime.ray.checkpoints import STATE_DEADLINE_S
from slime.ray.lifetime import RunLifetime
from slime.ray.rollout.shares import HOOKS_ON_SAMPLES
from slime.ray.run_parts import WORK_DEADLINE_S
from slime.ray.utils import ActorFailure, get
from slime.utils.errors import UsageError
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger(__name__)

GENERATION = "the generation of a rollout"


@dataclass(frozen=True)
class PendingRollout:
    """A rollout that was begun.

    Attributes:
        samples: resolves when they are there.
        train_data: what the trainer takes of them, and metric records (`RolloutManager.train_data`), made after them.
    """

    samples: ray.ObjectRef
    train_data: list[ray.ObjectRef]


class TrainingRun(RunLifetime):
    """A running set of trainers, engines and a rollout manager; use it as a context manager, which ends them all."""

    def steps(self) -> Iterator[int]:
        """The ids of the rollouts to do."""
        first, end = self.plan.start_rollout_id, self.plan.num_rollout
        logging_utils.begin_rollouts(end - 1)
        self._status.count_rollouts(first, end)
        for rollout_id in range(first, end):
            yield rollout_id
            if rollout_id == self._ends_after:
                return

    def is_last(self, rollout_id: int) -> bool:
        """Whether no rollout follows this one."""
        return rollout_id + 1 >= self.plan.num_rollout or rollout_id == self._ends_after

    def start_generate(self, rollout_id: int) -> PendingRollout:
        """Begin a rollout and return at once; `wait_generated` waits for it.

        The data source's state is saved right after it where this rollout will be saved: a rollout that is begun
        ahead would otherwise already have moved it.
        """
        samples = self._manager.generate.remote(rollout_id)
        pending = PendingRollout(samples, self._manager.train_data.remote())
        is_wanted = self._save_is_due(rollout_id) or self._copies.is_due(rollout_id) or self._exit.is_possible
        if self.args.save and self._has_trainers and is_wanted:
            self._checkpoints.keep_state(rollout_id, self._manager.save.remote(rollout_id))
        return pending

    def may_start(self, rollout_id: int) -> bool:
        """Whether a rollout begun now will be fresh enough when it is trained (--max-weight-staleness), and the one
        that a resumed run begins (--deterministic)."""
        if not self.upkeep.sends_weights:
            return True
        return self._schedule.may_begin(rollout_id, self.upkeep.version, self.args.max_weight_staleness)

    @phase("generate")
    def wait_generated(self, pending: PendingRollout) -> PendingRollout:
        """Wait for the samples of a rollout, which `train_step` then takes."""
        self._wait_samples(pending)
        return pending

    def generate(self, rollout_id: int) -> PendingRollout:
        """Make the samples of a rollout."""
        return self.wait_generated(self.start_generate(rollout_id))

    @phase("generate")
    def drain(self, pending: PendingRollout | None) -> None:
        """Wait until a rollout that runs ahead is generated, so that no request is in flight."""
        if pending is not None:
            with suppress(ActorFailure, UsageError):  # whoever waits for its samples gets that error
                self._wait_samples(pending)

    def _wait_samples(self, pending: PendingRollout) -> None:
        """Wait until nobody asks the engines for this rollout any more; user code that reads its samples may."""
        self._wait_counted(pending.samples, GENERATION)
        if any(vars(self.args)[name] for name in HOOKS_ON_SAMPLES):
            self._wait_counted(pending.train_data, GENERATION)

    def _wait_counted(self, ref: ray.ObjectRef | list[ray.ObjectRef], what: str) -> None:
        start = time.monotonic()
        try:
            self.upkeep.wait(ref, what)
        finally:
            self._times.waited(time.monotonic() - start)

    @phase("train")
    def train_step(self, rollout_id: int, rollout: PendingRollout) -> None:
        """Train on a rollout whose samples are there; with --debug-rollout-only, which has no trainers, only log it.

        With a critic: its values go to the actor, whose advantages they become; the returns go back to the critic. The
        two take turns, and leave the GPU to each other with --offload-train. (In the first --num-critic-only-steps
        rollouts the actor makes returns, and updates nothing.)
        """
        self._rollout_id = rollout_id
        self.upkeep.replace()
        self.upkeep.welcome()
        if first := self.parts.critic or self.parts.actor:
            self.turns.to_trainer(first)  # meanwhile the manager makes the training data of the samples
        data, records = get(rollout.train_data, GENERATION, WORK_DEADLINE_S)
        self._times.generated(records)
        self._log(records)
        if self._has_trainers:
            self._train(rollout_id, data)
        logging_utils.end_rollout(rollout_id)
        self._status.count_rollouts(rollout_id + 1, self.plan.num_rollout)

    def _train(self, rollout_id: int, data: list[Any]) -> None:
        values = None
        if self.parts.critic:
            values = self.parts.critic.compute_values(rollout_id, data)
        self._checkpoints.finish(self.parts.groups, self.turns, if_written=True)
        self.turns.to_trainer(self.trainers)
        self.upkeep.is_ahead = True
        records, returns = self.trainers.train(rollout_id, data, values)
        if self.parts.critic:
            self.turns.to_trainer(self.parts.critic)
            records += self.parts.critic.train(rollout_id, data, returns)[0]
        self._log(records)
        self._log_rollout_record(self._times.trained(records))
        self._trained = range(self.plan.start_rollout_id, rollout_id + 1)

    @phase("save")
    def save_if_due(self, rollout_id: int) -> None:
        """Write a checkpoint every `--save-interval` rollouts, at epoch ends and after the last rollout; between them
        copy the trainers' states every `--peer-checkpoint-interval` rollouts."""
        self._end_if_asked(rollout_id)
        if not self._save_is_due(rollout_id):
            if not (self._has_trainers and self._copies.is_due(rollout_id)):
                self._checkpoints.forget_state(rollout_id)
            elif self._checkpoints.has_state_for_copy(rollout_id):
                metrics = self._copies.keep(rollout_id, self.parts.groups, self.turns)
                self._checkpoints.keep_state_of_copy(rollout_id)
                self._log_rollout_record(metrics)
            return
        self._save(rollout_id)

    def _save(self, rollout_id: int) -> None:
        start = time.monotonic()
        self._checkpoints.save(rollout_id, self.parts.groups, self.turns, is_last=self.is_last(rollout_id))
        self._log_rollout_record({"perf/save_model_time": time.monotonic() - start})

    def _end_if_asked(self, rollout_id: int) -> None:
        """Make this rollout the last, where a signal or the time asks for it."""
        if self._exit.is_possible and self._ends_after is None and (why := self._exit.why()):
            self._ends_after = rollout_id
            where = "it is saved" if self.args.save else "nothing is saved, for there is no --save"
            logger.warning("%s: the run ends after rollout %d; %s", why, rollout_id, where)

    def sync_is_due(self, rollout_id: int) -> bool:
        """Whether the engines get new weights after this rollout (every `sync_interval`, and after the last)."""
        return (rollout_id + 1) % self._sync_interval == 0 or self.is_last(rollout_id)

    @phase("sync")
    def sync_weights(self) -> None:
        """Send the trainer's weights to the engines, tell the manager their version, and let the engines generate."""
        notified = None
        if self.upkeep.sends_weights:
            self._settle_groups()
            self._log_rollout_record(self.upkeep.send_weights(self.upkeep.version + 1))
            notified = self._manager.set_weight_version.remote(self.upkeep.version)
        if self._has_trainers:
            self.turns.to_engines()
            if metrics := self.turns.take_metrics():
                self._log_rollout_record(metrics)
        if notified is not None:
            get(notified, "the rollout manager to hear of the weight sync", STATE_DEADLINE_S)
        if self.upkeep.sends_weights:
            self.upkeep.register()

    def _settle_groups(self) -> None:
        """With --deterministic wait for the groups of a fully async rollout, so that each is of one version."""
        if self.args.deterministic and keeps_requests_in_flight(self.args.rollout_function_path):
            self._wait_counted(self._manager.settle.remote(), "the groups that were begun")

    def eval_if_due(self, rollout_id: int) -> None:
        """Evaluate every `--eval-interval` rollouts, at epoch ends and after the last rollout."""
        self.start_eval_if_due(rollout_id)
        self.finish_eval()

    def start_eval_if_due(self, rollout_id: int) -> None:
        """As `eval_if_due`, in the background: `finish_eval` waits for it."""
        plan = self.plan
        if should_run_periodic_action(rollout_id, self._eval_interval, plan.num_rollout_per_epoch, plan.num_rollout):
            self._start_eval(rollout_id, step=rollout_id + 1)

    @phase("eval")
    def finish_eval(self) -> None:
        """Wait for the evaluation that runs in the background, if one does, and log it at its own step."""
        if self._evaluation is not None:
            (step, pending), self._evaluation = self._evaluation, None
            records, shown = self.upkeep.wait(pending, "the evaluation")
            self._log(records)
            logging_utils.log_eval_samples(shown, step)

    def eval_before_training(self) -> None:
        """Evaluate the weights as they were loaded: always with --eval-only."""
        if self._eval_interval is None:
            return
        if self.args.eval_only or (self.plan.start_rollout_id == 0 and not self.args.skip_eval_before_train):
            self._start_eval(self.plan.start_rollout_id, step=self.plan.start_rollout_id)
            self.finish_eval()

    @property
    def _eval_interval(self) -> int | None:
        return self.args.eval_interval if self._has_engines and self._ends_after is None else None

    def _save_is_due(self, rollout_id: int) -> bool:
        if not self._has_trainers or (self.args.save is None and self.args.save_hf is None):
            return False
        plan = self.plan
        return self.is_last(rollout_id) or should_run_periodic_action(
            rollout_id, self.args.save_interval, plan.num_rollout_per_epoch, plan.num_rollout
        )

    def _start_eval(self, rollout_id: int, *, step: int) -> None:
        self.finish_eval()
        self._evaluation = step, self._manager.eval.remote(rollout_id, step)
