"""TrainingRun: the verbs of a training run, shared by train.py and train_async.py, which differ only in their order.

It says when its parts (slime.ray.run_parts) start and end, and is the one writer of metrics: the manager and the
trainers return records, it logs them. It knows no algorithm: what a rollout or a train step is, the actors know.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.roles import Role
from slime.config.rules.losses import check_critic_only_steps
from slime.config.rules.run_dirs import move_earlier_runs
from slime.observability import logging_utils
from slime.observability.phases import Phases, phase
from slime.observability.profiler import nothing_recorded
from slime.observability.progress import Count
from slime.observability.status import START, RunStatus
from slime.observability.step_times import StepTimes
from slime.ray import progress_board
from slime.ray.actor_group import RayTrainGroup
from slime.ray.attempts import Attempt, attempts
from slime.ray.checkpoints import STATE_DEADLINE_S, Checkpoints
from slime.ray.engine_upkeep import EngineUpkeep
from slime.ray.exit_request import ExitRequest
from slime.ray.gpu_turns import GpuTurns
from slime.ray.peer_copies import PeerCopies
from slime.ray.peer_state import owners_of
from slime.ray.run_guard import RunGuard
from slime.ray.run_parts import WORK_DEADLINE_S, RunParts, try_to_end
from slime.ray.utils import ActorFailure, get
from slime.rollout.weight_versions import SyncSchedule
from slime.utils.checkpoint_paths import latest_iteration
from slime.utils.errors import UsageError
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger(__name__)

MetricRecord = tuple[dict[str, float], str]
GENERATION = "the generation of a rollout"


@dataclass(frozen=True)
class RunPlan:
    """What is known only once trainers and data are loaded: which rollouts this process runs."""

    start_rollout_id: int
    num_rollout: int
    num_rollout_per_epoch: int


@dataclass(frozen=True)
class PendingRollout:
    """A rollout that was begun.

    Attributes:
        samples: they are there; nobody asks the engines for more.
        train_data: what the trainer takes of them (`RolloutManager.train_data`), which is made behind them.
    """

    samples: ray.ObjectRef
    train_data: ray.ObjectRef


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation that was begun."""

    pending: ray.ObjectRef
    step: int


class TrainingRun:
    """A running set of trainers, engines and a rollout manager; use it as a context manager, which ends them all.

    Args:
        args: the parsed flags.
        sync_interval: the driver syncs the weights after every so many rollouts.
    """

    def __init__(self, args: Args, *, sync_interval: int = 1) -> None:
        self._parts = RunParts(args)
        self._sync_interval = sync_interval
        self._first_version = 1
        self._has_engines = not args.debug_train_only
        self._has_trainers = not args.debug_rollout_only
        self._rollout_id = 0
        self._evaluation: _Evaluation | None = None
        self._trained = range(0)
        self._times = StepTimes()
        self._checkpoints = Checkpoints(
            args.save,
            is_async=args.async_save,
            exports=bool(args.save_hf),
            needs_each=args.release_train,
            log=lambda metrics: self._log_rollout_record(metrics),
        )
        self._copies = PeerCopies(args.peer_checkpoint_interval)
        self._guard: RunGuard | None = None
        self.phases = Phases()
        self._status = RunStatus(self.phases, self._counts, logger.info)
        self._upkeep = EngineUpkeep(self._parts, self.phases, is_on=args.use_fault_tolerance and self._has_engines)
        self._exit = ExitRequest(args.exit_signal if args.exit_signal_handler else None, args.exit_duration_in_mins)
        self._ends_after: int | None = None

    # ---- the verbs of the drivers

    def attempts(self) -> Iterator[Attempt]:
        """Contexts for the schedule: another one follows where an actor was lost in one (--max-restarts)."""
        return attempts(self.args.max_restarts, self._start_again)

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

        The data source's state is saved right behind it where this rollout will be saved: a rollout that is begun
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
        if not self._upkeep.sends_weights:
            return True
        return self._schedule.may_begin(rollout_id, self._upkeep.version, self.args.max_weight_staleness)

    @phase("generate")
    def wait_generated(self, pending: PendingRollout) -> PendingRollout:
        """Wait for the samples of a rollout, which `train_step` then takes."""
        start = time.monotonic()
        self._upkeep.wait(pending.samples, GENERATION)
        self._times.waited(time.monotonic() - start)
        return pending

    def generate(self, rollout_id: int) -> PendingRollout:
        """Make the samples of a rollout."""
        return self.wait_generated(self.start_generate(rollout_id))

    @phase("generate")
    def drain(self, pending: PendingRollout | None) -> None:
        """Wait until a rollout that runs ahead is generated, so that no request is in flight."""
        if pending is not None:
            start = time.monotonic()
            with suppress(ActorFailure, UsageError):  # whoever waits for its samples hears of that
                self._upkeep.wait(pending.samples, GENERATION)
            self._times.waited(time.monotonic() - start)

    @phase("train")
    def train_step(self, rollout_id: int, rollout: PendingRollout) -> None:
        """Train on a rollout whose samples are there; with --debug-rollout-only, which has no trainers, only log it.

        With a critic: its values go to the actor, whose advantages they become; the returns go back to the critic. The
        two take turns, and leave the GPU to each other with --offload-train. (In the first --num-critic-only-steps
        rollouts the actor makes returns, and updates nothing.)
        """
        self._rollout_id = rollout_id
        self._upkeep.replace()
        if first := self._parts.critic or self._parts.actor:
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
        if self._parts.critic:
            values = self._parts.critic.compute_values(rollout_id, data)
        self._checkpoints.finish(self._parts.groups, self.turns, if_written=True)
        self.turns.to_trainer(self.trainers)
        records, returns = self.trainers.train(rollout_id, data, values)
        if self._parts.critic:
            self.turns.to_trainer(self._parts.critic)
            records += self._parts.critic.train(rollout_id, data, returns)[0]
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
                metrics = self._copies.keep(rollout_id, self._parts.groups, self.turns)
                self._checkpoints.keep_state_of_copy(rollout_id)
                self._log_rollout_record(metrics)
            return
        start = time.monotonic()
        self._checkpoints.save(rollout_id, self._parts.groups, self.turns, is_last=self.is_last(rollout_id))
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
        told = None
        if self._upkeep.sends_weights:
            self._settle_groups()
            self._log_rollout_record(self._upkeep.send_weights(self._upkeep.version + 1))
            told = self._manager.set_weight_version.remote(self._upkeep.version)
        if self._has_trainers:
            self.turns.to_engines()
            if metrics := self.turns.take_metrics():
                self._log_rollout_record(metrics)
        if told is not None:
            get(told, "the rollout manager to hear of the weight sync", STATE_DEADLINE_S)
        if self._upkeep.sends_weights:
            self._upkeep.register()

    def _settle_groups(self) -> None:
        """With --deterministic wait for the groups of a fully async rollout, so that each is of one version."""
        if self.args.deterministic and keeps_requests_in_flight(self.args.rollout_function_path):
            start = time.monotonic()
            self._upkeep.wait(self._manager.settle.remote(), "the groups that were begun")
            self._times.waited(time.monotonic() - start)

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
            begun, self._evaluation = self._evaluation, None
            records, shown = self._upkeep.wait(begun.pending, "the evaluation")
            self._log(records)
            logging_utils.log_eval_samples(shown, begun.step)

    def eval_before_training(self) -> None:
        """Evaluate the weights as they were loaded: always with --eval-only."""
        if self._eval_interval is None:
            return
        if self.args.eval_only or (self.plan.start_rollout_id == 0 and not self.args.skip_eval_before_train):
            self._start_eval(self.plan.start_rollout_id, step=self.plan.start_rollout_id)
            self.finish_eval()

    # ---- start and end

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Finish; where something else is behind the error, raise that."""
        cause = self._guard.cause(error) if error is not None and self._guard is not None else error
        self.finish(failed=error is not None)
        if cause is not None and cause is not error:
            raise cause from error

    @phase(START)
    def _start(self) -> None:
        args, parts, start = self.args, self._parts, time.monotonic()
        move_earlier_runs(args)
        self._status.begin()
        directory = Path(args.output_dir).resolve()
        self._guard = RunGuard(self.phases, directory, stall_timeout_s=args.stall_timeout, on_stall=args.on_stall)
        logger.info("logs of every process: %s", directory / "logs")
        self._status.announce("connecting to Ray")
        self._guard.watch_ray(parts.connect())
        self._status.announce("placing trainers and engines")
        parts.place()
        logging_utils.init_tracking(self.args)
        parts.create_manager()
        self._guard.watch(lambda: parts.manager)
        self._announce_parts()
        self._connect(parts.start())
        self._exit.listen()
        logger.info("everything is running after %.1f s", time.monotonic() - start)

    @phase(START)
    def _start_again(self) -> None:
        """Have new trainers, and the data source, go on from the newest checkpoint, or from newer copies in memory, or
        begin again where there is neither; engines stay where the manager, whose they are, is there."""
        parts = self._parts
        roles = [group.role for group in parts.groups]
        parts.end_trainers()
        parts.use_what_is_left(resumes=self._checkpoints.has_saved)
        copied = self._newest_copy(roles)
        self._checkpoints.forget_what_was_begun()
        evaluation, self._evaluation = self._evaluation, None
        self._announce_parts()
        started = parts.start_again(
            evaluation.pending if evaluation is not None else None,
            meanwhile=functools.partial(self._upkeep.serve_all, with_weights=False),
        )
        if copied is not None:
            self._copies.restore(copied, parts.groups, parts.turns)
            reopened = self._manager.begin_again.remote(self.args.save)  # its state is there, whatever trainers load
            get(reopened, "the data source", STATE_DEADLINE_S)
        self._connect(started, first=None if copied is None else copied + 1)

    def _announce_parts(self) -> None:
        parts = [name for name, has in (("engines", self._has_engines), ("trainers", self._has_trainers)) if has]
        self._status.announce(f"starting {' and '.join(parts)}, loading weights")

    def _newest_copy(self, roles: Sequence[Role]) -> int | None:
        """The rollout behind which trainers can go on from copies in memory, where no checkpoint is as new."""
        owners = [owner for role in roles for owner in owners_of(role, self._parts.world_size)]
        copied = self._copies.newest(owners)
        saved = latest_iteration(self.args.save) if self._checkpoints.has_saved else None
        if copied is None and saved is None:
            logger.warning("there is no checkpoint of this run: it begins again with what it began with")
        return copied if copied is not None and (saved is None or copied > saved) else None

    def _connect(self, started: dict[str, Any], *, first: int | None = None) -> None:
        """Let trainers, data source and engines that were started know of each other.

        Args:
            started: what the trainers say.
            first: the first rollout, where that is not the one behind what they have loaded.
        """
        for warning in started["warnings"]:
            logger.warning("trainer: %s", warning)
        parallel = started["parallel_config"]
        get(self._manager.set_train_parallel_config.remote(parallel), "the rollout manager", STATE_DEADLINE_S)
        per_epoch = get(self._manager.get_num_rollout_per_epoch.remote(), "the data source", STATE_DEADLINE_S)
        resumed_from = int(started["start_rollout_id"] if first is None else first) - 1
        if first is None:
            given = self.args.start_rollout_id
            first = int(started["start_rollout_id"] if given is None else given)
        num_rollout = self.args.num_rollout
        self.plan = RunPlan(first, self.args.num_epoch * per_epoch if num_rollout is None else num_rollout, per_epoch)
        if resumed_from >= 0 and not self.args.eval_only:
            left = f"going on at {first}" if first < self.plan.num_rollout else "it was the last: no rollout is left"
            logger.info("resumed from rollout %d; %s", resumed_from, left)
        if problems := list(check_critic_only_steps(self.args, self.plan.num_rollout)):
            raise UsageError(problems)  # where --num-epoch could not be counted before
        self._warn_of_no_profile(range(first, self.plan.num_rollout))
        if first > 0 and not self.args.eval_only:
            get(
                self._manager.load.remote(first - 1),
                f"the data source's state of rollout {first - 1}",
                STATE_DEADLINE_S,
            )
        if self._has_engines and self._has_trainers:  # without trainers the weights stay those that engines start with
            self._first_version = self._upkeep.version + 1
            get(self._manager.set_sync_schedule.remote(self._schedule), "the rollout manager", STATE_DEADLINE_S)
            if not self._upkeep.connect():
                logger.warning("no engine takes the trainer's weights: what is trained is not what generates")
            self._rollout_id = first
            self.sync_weights()

    def finish(self, *, failed: bool = False) -> None:
        """End everything that was started; after a failure without waiting for trainers that may be stuck.

        Trackers come last: they may have minutes of uploads left, in which nothing of the run should hold a GPU.
        """
        try_to_end("the status", self._status.end)
        if not failed:
            self._warn_of_no_profile(self._trained)
            try_to_end("the state of the last copies", self._checkpoints.forget_state_of_copy)
        if self._guard is not None:
            try_to_end("the watchdog", self._guard.before_end)
            if ray.is_initialized():
                if self._guard.lost_ray is None:
                    self._end_parts(graceful=not failed)
                self._guard.shut_ray_down()
        try_to_end("the trackers", logging_utils.finish_tracking)
        if self._guard is not None:
            self._guard.end(failed=failed)
            self._guard = None

    def _end_parts(self, *, graceful: bool) -> None:
        if self.args.ray_timeline_path:
            try_to_end("the timeline", self._write_timeline)
        self._parts.end(graceful=graceful)
        try_to_end("the copies of trainers", self._copies.end)

    # ---- inside

    @property
    def args(self) -> Any:
        """The flags with which the run goes on."""
        return self._parts.args

    @property
    def trainers(self) -> RayTrainGroup:
        """The trainer ranks."""
        assert self._parts.actor is not None, "the run is not started: use it as a context manager"
        return self._parts.actor

    @property
    def turns(self) -> GpuTurns:
        """Who has the GPUs."""
        return self._parts.turns

    @property
    def _manager(self) -> Any:
        return self._parts.manager

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

    def _warn_of_no_profile(self, rollouts: range) -> None:
        args = self.args
        asked = range(args.profile_step_start, args.profile_step_end)
        if args.use_pytorch_profiler and (sentence := nothing_recorded(asked, rollouts)):
            logger.warning("%s", sentence)

    def _write_timeline(self) -> None:
        path = Path(self.args.ray_timeline_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ray.timeline()))
        logger.info("timeline of the Ray actors: %s", path)

    def _start_eval(self, rollout_id: int, *, step: int) -> None:
        self.finish_eval()
        self._evaluation = _Evaluation(self._manager.eval.remote(rollout_id, step), step)

    @property
    def _schedule(self) -> SyncSchedule:
        plan = self.plan
        return SyncSchedule(
            plan.start_rollout_id, plan.num_rollout, self._sync_interval, self._first_version, self._stops_every
        )

    @property
    def _stops_every(self) -> tuple[int, ...]:
        """Periods of the rollouts behind which this run may be resumed, where that must change nothing."""
        args = self.args
        if not args.deterministic or args.save is None:
            return ()
        saves = () if args.save_interval is None else (args.save_interval, self.plan.num_rollout_per_epoch)
        return tuple(period for period in (*saves, args.peer_checkpoint_interval) if period)

    def _counts(self) -> list[Count]:
        if self._guard is None or self._parts.manager is None:
            return []
        said = progress_board.said_by(self._guard.run, progress_board.MANAGER)
        return [(what, done, total) for what, done, total in said.get("under_way", ())]

    def _log_rollout_record(self, metrics: dict[str, float]) -> None:
        self._log([({**metrics, "rollout/step": self._rollout_id}, "rollout/step")])

    def _log(self, records: list[MetricRecord]) -> None:
        for metrics, step_key in records:
            logging_utils.log(self.args, metrics, step_key)
