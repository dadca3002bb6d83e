"""TrainingRun: the verbs of a training run, shared by train.py and train_async.py, which differ only in their order.

It starts and ends everything, and is the one writer of metrics: the manager and the trainers return records, it logs
them.
It knows no algorithm: what a rollout or a train step is, the actors know.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from slime.observability import logging_utils
from slime.observability.profiler import nothing_recorded
from slime.observability.progress import progress_bar, set_progress_factory
from slime.observability.step_times import StepTimes
from slime.ray.actor_group import RayTrainGroup
from slime.ray.gpu_turns import GpuTurns
from slime.ray.placement_group import connect_ray, create_placement
from slime.ray.released_trainers import ReleasedTrainGroup
from slime.ray.resume_point import settle_checkpoint
from slime.ray.rollout.manager import CONCURRENCY_GROUPS, RolloutManager, ray_progress_bar
from slime.ray.start import START_DEADLINE_S, start_side_by_side
from slime.ray.utils import ActorFailure, actor_env, get
from slime.rollout.weight_versions import SyncSchedule
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger(__name__)

MetricRecord = tuple[dict[str, float], str]
WORK_DEADLINE_S = 24 * 3600.0  # generation has no bound of its own; each request inside it has one
STATE_DEADLINE_S = 600.0
GENERATION = "the generation of a rollout"
DISPOSE_DEADLINE_S = 60.0


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

    def __init__(self, args: Any, *, sync_interval: int = 1) -> None:
        self.args = args
        self._sync_interval = sync_interval
        self._weight_version = 0
        self._engine_count = 0
        self._has_engines = not args.debug_train_only
        self._has_trainers = not args.debug_rollout_only
        self._syncs_weights = False
        self._rollout_id = 0
        self._trainers: RayTrainGroup | None = None
        self._critic: RayTrainGroup | None = None
        self._manager: Any = None
        self._turns: GpuTurns | None = None
        self._state_saved: dict[int, ray.ObjectRef] = {}
        self._evaluation: _Evaluation | None = None
        self._trained = range(0)
        self._times = StepTimes()

    # ---- the verbs of the drivers

    def steps(self) -> Iterator[int]:
        """The ids of the rollouts to do, with a progress bar over them (on a terminal; a log has a line a step)."""
        ids = range(self.plan.start_rollout_id, self.plan.num_rollout)
        with progress_bar(len(ids), "rollouts") if sys.stderr.isatty() else nullcontext() as bar:
            for rollout_id in ids:
                yield rollout_id
                if bar is not None:
                    bar.update(1)

    def is_last(self, rollout_id: int) -> bool:
        """Whether no rollout follows this one."""
        return rollout_id + 1 >= self.plan.num_rollout

    def start_generate(self, rollout_id: int) -> PendingRollout:
        """Begin a rollout and return at once; `wait_generated` waits for it.

        The data source's state is saved right behind it where this rollout will be saved: a rollout that is begun
        ahead would otherwise already have moved it.
        """
        samples = self._manager.generate.remote(rollout_id)
        pending = PendingRollout(samples, self._manager.train_data.remote())
        if self._save_is_due(rollout_id) and self.args.save:
            self._state_saved[rollout_id] = self._manager.save.remote(rollout_id)
        return pending

    def may_start(self, rollout_id: int) -> bool:
        """Whether a rollout begun now will be fresh enough when it is trained (--max-weight-staleness)."""
        bound = self.args.max_weight_staleness
        if not self._syncs_weights or bound is None:
            return True
        return self._schedule.version_at(rollout_id) - self._weight_version <= bound

    def wait_generated(self, pending: PendingRollout) -> PendingRollout:
        """Wait for the samples of a rollout, which `train_step` then takes."""
        start = time.monotonic()
        get(pending.samples, GENERATION, WORK_DEADLINE_S)
        self._times.waited(time.monotonic() - start)
        return pending

    def generate(self, rollout_id: int) -> PendingRollout:
        """Make the samples of a rollout."""
        return self.wait_generated(self.start_generate(rollout_id))

    def drain(self, pending: PendingRollout | None) -> None:
        """Wait until a rollout that runs ahead is generated, so that no request is in flight."""
        if pending is not None:
            start = time.monotonic()
            ray.wait([pending.samples], timeout=WORK_DEADLINE_S, fetch_local=False)
            self._times.waited(time.monotonic() - start)

    def train_step(self, rollout_id: int, rollout: PendingRollout) -> None:
        """Train on a rollout whose samples are there; with --debug-rollout-only, which has no trainers, only log it.

        With a critic: its values go to the actor, whose advantages they become; the returns go back to the critic. The
        two take turns, and leave the GPU to each other with --offload-train. (In the first --num-critic-only-steps
        rollouts the actor makes returns, and updates nothing.)
        """
        self._rollout_id = rollout_id
        if self.args.use_fault_tolerance and self._has_engines:
            replaced = self._manager.replace_engines.remote()
            get(replaced, "engines in place of lost ones", START_DEADLINE_S)
            if not self._syncs_weights:  # they have the weights that they are to have
                get(self._manager.register_engines.remote(), "the router to take new engines", STATE_DEADLINE_S)
        if first := self._critic or self._trainers:
            self.turns.to_trainer(first)  # meanwhile the manager makes the training data of the samples
        data, records = get(rollout.train_data, GENERATION, WORK_DEADLINE_S)
        self._times.generated(records)
        self._log(records)
        if not self._has_trainers:
            return
        values = None
        if self._critic:
            values = self._critic.compute_values(rollout_id, data)
        self.turns.to_trainer(self.trainers)
        records, returns = self.trainers.train(rollout_id, data, values)
        if self._critic:
            self.turns.to_trainer(self._critic)
            records += self._critic.train(rollout_id, data, returns)[0]
        self._log(records)
        self._log_rollout_record(self._times.trained(records))
        self._trained = range(self.plan.start_rollout_id, rollout_id + 1)

    def save_if_due(self, rollout_id: int) -> None:
        """Write a checkpoint every `--save-interval` rollouts, at epoch ends and after the last rollout."""
        if not self._save_is_due(rollout_id):
            return
        start = time.monotonic()
        if (state_saved := self._state_saved.pop(rollout_id, None)) is not None:
            get(state_saved, f"the data source's state of rollout {rollout_id}", STATE_DEADLINE_S)
        why_not = None
        if self._critic:
            self.turns.to_trainer(self._critic)
            why_not = self._critic.save_model(rollout_id)  # first: the actor's says which iterations are complete
        self.turns.to_trainer(self.trainers)
        why_not = why_not or self.trainers.save_model(rollout_id)
        if why_not:
            self._go_on_without(rollout_id, why_not)
        seconds = {"perf/save_model_time": time.monotonic() - start}
        self._log_rollout_record({**seconds, "perf/checkpoint_not_written": float(bool(why_not))})

    def _go_on_without(self, rollout_id: int, why: str) -> None:
        """A checkpoint could not be written: the one before stays. After the last rollout there is no other chance."""
        what = f"the checkpoint of rollout {rollout_id} was not written: {why}"
        if self.is_last(rollout_id):
            raise ActorFailure(f"{what}; free some room and start again with --load {self.args.save}.")
        logger.error("%s; the one before is kept, and the run goes on", what)

    def sync_is_due(self, rollout_id: int) -> bool:
        """Whether the engines get new weights after this rollout (every `sync_interval`, and after the last)."""
        return (rollout_id + 1) % self._sync_interval == 0 or self.is_last(rollout_id)

    def sync_weights(self) -> None:
        """Send the trainer's weights to the engines, tell the manager their version, and let the engines generate."""
        told = None
        if self._syncs_weights:
            self.turns.to_weight_sync(self.trainers)
            self._follow_engines()
            self._log_rollout_record(self.trainers.update_weights())
            self._weight_version += 1
            told = self._manager.set_weight_version.remote(self._weight_version)
        if self._has_trainers:
            self.turns.to_engines()
            if metrics := self.turns.take_metrics():
                self._log_rollout_record(metrics)
        if told is not None:
            get(told, "the rollout manager to hear of the weight sync", STATE_DEADLINE_S)
        if self._syncs_weights and self.args.use_fault_tolerance:
            get(self._manager.register_engines.remote(), "the router to take new engines", STATE_DEADLINE_S)

    def _follow_engines(self) -> None:
        """Have the trainer send to the engines that are there, where some were lost or replaced."""
        if not self.args.use_fault_tolerance:
            return
        count = get(self._manager.pause_watch.remote(), "the watch over the engines", STATE_DEADLINE_S)
        if count != self._engine_count:
            engines, sizes = get(self._manager.get_updatable_engines.remote(), "the engine handles", STATE_DEADLINE_S)
            if not engines:
                raise ActorFailure("every engine of the trained model is lost; their logs say why")
            self.trainers.connect_rollout_engines(engines, sizes)
            self._engine_count = count

    def eval_if_due(self, rollout_id: int) -> None:
        """Evaluate every `--eval-interval` rollouts and at epoch ends."""
        self.start_eval_if_due(rollout_id)
        self.finish_eval()

    def start_eval_if_due(self, rollout_id: int) -> None:
        """As `eval_if_due`, in the background: `finish_eval` waits for it."""
        if should_run_periodic_action(rollout_id, self._eval_interval, self.plan.num_rollout_per_epoch):
            self._start_eval(rollout_id, step=rollout_id + 1)

    def finish_eval(self) -> None:
        """Wait for the evaluation that runs in the background, if one does, and log it at its own step."""
        if self._evaluation is not None:
            begun, self._evaluation = self._evaluation, None
            records, shown = get(begun.pending, "the evaluation", WORK_DEADLINE_S)
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
        except BaseException:
            self.finish(failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(failed=kind is not None)

    def _start(self) -> None:
        args, start = self.args, time.monotonic()
        connect_ray(args)
        self._placement = create_placement(args)
        logging_utils.init_tracking(args)
        log_dir = Path(args.output_dir).resolve() / "logs"
        is_terminal = sys.stderr.isatty()
        if is_terminal:
            set_progress_factory(ray_progress_bar)
        logger.info("logs of every process: %s", log_dir)
        engines = self._placement.engine_slots
        self._manager = (
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RolloutManager)
            .options(num_cpus=0, max_restarts=0, runtime_env={"env_vars": actor_env()})
            .remote(args, engines, log_path=str(log_dir / "rollout_manager.log"), show_progress=is_terminal)
        )
        self._turns = GpuTurns(args, self._manager)
        self._connect(self._start_everything(f"the start of the engines (logs: {log_dir})"))
        logger.info("everything is running after %.1f s", time.monotonic() - start)

    def _start_everything(self, engines: str) -> dict[str, Any]:
        """Start engines and trainers; `engines` is what the start of the former is called in an error."""
        engines_started = self._manager.start.remote()
        self.args = settle_checkpoint(self.args)
        return start_side_by_side(self._create_trainers(), self.turns, engines_started, what=engines)

    def _create_trainers(self) -> list[RayTrainGroup]:
        """The trainer groups in the order in which they take the GPU: where they start in turn, the actor comes last,
        and is there for the weight sync."""
        if not self._has_trainers:
            return []
        if self.args.use_critic:
            self._critic = RayTrainGroup(self.args, self._placement, role="critic")
        group_cls = ReleasedTrainGroup if self.args.release_train else RayTrainGroup
        self._trainers = group_cls(self.args, self._placement)
        return [*filter(None, [self._critic]), self._trainers]

    def _connect(self, started: dict[str, Any]) -> None:
        for warning in started["warnings"]:
            logger.warning("trainer: %s", warning)
        parallel = started["parallel_config"]
        get(self._manager.set_train_parallel_config.remote(parallel), "the rollout manager", STATE_DEADLINE_S)
        per_epoch = get(self._manager.get_num_rollout_per_epoch.remote(), "the data source", STATE_DEADLINE_S)
        first = started["start_rollout_id"] if self.args.start_rollout_id is None else self.args.start_rollout_id
        num_rollout = self.args.num_rollout
        self.plan = RunPlan(first, self.args.num_epoch * per_epoch if num_rollout is None else num_rollout, per_epoch)
        self._warn_of_no_profile(range(first, self.plan.num_rollout))
        if first > 0 and not self.args.eval_only:
            get(
                self._manager.load.remote(first - 1),
                f"the data source's state of rollout {first - 1}",
                STATE_DEADLINE_S,
            )
        if self._has_engines and self._has_trainers:  # without trainers the weights stay those that engines start with
            schedule = self._manager.set_sync_schedule.remote(first, self.plan.num_rollout, self._sync_interval)
            get(schedule, "the rollout manager", STATE_DEADLINE_S)
            updatable = self._manager.get_updatable_engines.remote()
            engines, engine_sizes = get(updatable, "the engine handles", STATE_DEADLINE_S)
            self._syncs_weights = bool(engines)
            if engines:
                self.trainers.connect_rollout_engines(engines, engine_sizes)
            else:
                logger.warning("no engine takes the trainer's weights: what is trained is not what generates")
            self._rollout_id = first
            self.sync_weights()

    def finish(self, *, failed: bool = False) -> None:
        """End everything that was started; after a failure without waiting for trainers that may be stuck."""
        with suppress(Exception):
            logging_utils.finish_tracking()
        if not failed:
            self._warn_of_no_profile(self._trained)
        if ray.is_initialized():
            if self.args.ray_timeline_path:
                self._end("the timeline", self._write_timeline)
            for group in filter(None, (self._trainers, self._critic)):
                self._end("the trainers", functools.partial(group.shutdown, graceful=not failed))
            if self._manager is not None:
                dispose = self._manager.dispose
                self._end("the engines", lambda: get(dispose.remote(), "the end of the engines", DISPOSE_DEADLINE_S))
            self._trainers = self._critic = self._manager = None
            ray.shutdown()

    # ---- inside

    @property
    def trainers(self) -> RayTrainGroup:
        """The trainer ranks."""
        assert self._trainers is not None, "the run is not started: use it as a context manager"
        return self._trainers

    @property
    def turns(self) -> GpuTurns:
        """Who has the GPUs."""
        assert self._turns is not None, "the run is not started: use it as a context manager"
        return self._turns

    @property
    def _eval_interval(self) -> int | None:
        return self.args.eval_interval if self._has_engines else None

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
        return SyncSchedule(self.plan.start_rollout_id, self.plan.num_rollout, self._sync_interval)

    def _log_rollout_record(self, metrics: dict[str, float]) -> None:
        self._log([({**metrics, "rollout/step": self._rollout_id}, "rollout/step")])

    def _log(self, records: list[MetricRecord]) -> None:
        for metrics, step_key in records:
            logging_utils.log(self.args, metrics, step_key)

    @staticmethod
    def _end(what: str, action: Any) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the boundary: one part that does not end must not keep the others
            logger.warning("ending %s: %s", what, error)
