"""How a training run starts, resumes after a loss, and ends.

`slime.ray.run_parts` makes the parts; here they get to know each other, are watched over, and are ended. The verbs in
between are `slime.ray.run.TrainingRun`'s.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from slime.checkpoints.paths import latest_iteration
from slime.checkpoints.remote import Uploads
from slime.config.args import Args
from slime.config.roles import Role
from slime.config.rules.losses import check_critic_only_steps
from slime.config.rules.run_dirs import claim_run_dirs, line_to_go_on, move_earlier_runs
from slime.dashboard.address import start_beside_run
from slime.observability import logging_utils
from slime.observability.phases import START, Phases, RunStatus, phase
from slime.observability.profiler import nothing_recorded
from slime.observability.timer import StepTimes
from slime.processes.progress import Count
from slime.processes.registry import newest_line, registry
from slime.ray.actor_group import RayTrainGroup
from slime.ray.checkpoints import STATE_DEADLINE_S, Checkpoints
from slime.ray.engine_upkeep import EngineUpkeep
from slime.ray.peer_copies import PeerCopies, owners_of
from slime.ray.rollout.router import is_free
from slime.ray.run_parts import GpuTurns, RunParts, try_to_end
from slime.ray.schedule import Attempt, ExitRequest, attempts
from slime.ray.supervisor import Supervisor
from slime.ray.utils import MANAGER, get, progress_of
from slime.rollout.sampling.weight_versions import SyncSchedule
from slime.utils.accelerator import compile_cache
from slime.utils.errors import UsageError, refuse
from slime.utils.http.api_keys import command_line_without_secrets, use_keys
from slime.utils.misc import url_host

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent.parent

MetricRecord = tuple[dict[str, float], str]


@dataclass(frozen=True)
class RunPlan:
    """What is known only once trainers and data are loaded: which rollouts this process runs."""

    start_rollout_id: int
    num_rollout: int
    num_rollout_per_epoch: int


class RunLifetime:
    """A context in which the parts of a run are there; it ends them all.

    Args:
        args: the parsed flags.
        sync_interval: the driver syncs the weights after every so many rollouts.

    Attributes:
        metrics: name -> the last value that was logged.
    """

    def __init__(self, args: Args, *, sync_interval: int = 1) -> None:
        self.parts = RunParts(args)
        self._sync_interval = sync_interval
        self._first_version = 1
        self._has_engines = not args.debug_train_only
        self._has_trainers = not args.debug_rollout_only
        self._rollout_id = 0
        self.metrics: dict[str, float] = {}
        self._evaluation: tuple[int, ray.ObjectRef] | None = None  # the step and the result of one that was begun
        self._trained = range(0)
        self._times = StepTimes()
        self._uploads = Uploads(args)
        self._checkpoints = Checkpoints(
            args.save,
            is_async=args.async_save,
            exports=bool(args.save_hf),
            uploads=self._uploads,
            needs_each=args.release_train,
            log=lambda metrics: self._log_rollout_record(metrics),
        )
        self._copies = PeerCopies(args.peer_checkpoint_interval)
        self._supervisor: Supervisor | None = None
        self._claimed: list[int] = []
        self._events: logging_utils.RunEvents | None = None
        self.phases = Phases(on_change=lambda change, name: self._tell(change, phase=name, rollout=self._rollout_id))
        self._status = RunStatus(self.phases, self._counts, logger.info, self._news_of_engines)
        is_on = args.use_fault_tolerance and self._has_engines
        self.upkeep = EngineUpkeep(self.parts, self.phases, is_on=is_on, may_grow=args.elastic_rollout)
        self._exit = ExitRequest(args.exit_signal if args.exit_signal_handler else None, args.exit_duration_in_mins)
        self._ends_after: int | None = None

    def _news_of_engines(self, seconds: float) -> str:
        logs = Path(self.args.output_dir, "logs").glob("engine_*.log")
        return newest_line(logs, since=time.time() - seconds)  # an earlier run may have had this directory

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.push(self)
            self._start()
            started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Finish; raise what caused the error, if that is something else."""
        cause = self._supervisor.cause(error) if error is not None and self._supervisor is not None else error
        self.finish(failed=error is not None)
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        status = "finished" if error is None else "stopped" if is_stopped else "failed"
        self._tell("finish", status=status, error="" if is_stopped or cause is None else str(cause))
        if cause is not None and cause is not error:
            raise cause from error

    def attempts(self) -> Iterator[Attempt]:
        """Contexts for the schedule: another one follows where an actor was lost in one (--max-restarts)."""
        return attempts(self.args.max_restarts, self._start_again)

    def sync_weights(self) -> None:
        """Send the trainer's weights to the engines."""
        raise NotImplementedError

    @phase(START)
    def _start(self) -> None:
        args, parts, start = self.args, self.parts, time.monotonic()
        self._uploads.open()
        move_earlier_runs(args)
        self._claimed = claim_run_dirs(args)
        self._status.begin()
        directory = Path(args.output_dir).resolve()
        self._supervisor = Supervisor(
            self.phases, directory, stall_timeout_s=args.stall_timeout, on_stall=args.on_stall
        )
        logger.info("logs of every process: %s", directory / "logs")
        compile_cache.use(args.compile_cache_dir, os.environ)
        self._begin_events(directory)
        start_beside_run(directory, args.dashboard_host, args.dashboard_port)
        self._status.announce("connecting to Ray")
        self._supervisor.watch_ray(parts.connect())
        self._status.announce("placing trainers and engines")
        parts.place()
        logging_utils.init_tracking(self.args)
        if args.prometheus_port is not None:
            self._start_prometheus(directory, args.prometheus_port)
        parts.create_manager()
        self._supervisor.watch(lambda: parts.manager)
        self._announce_parts()
        self._connect(parts.start())
        self._exit.listen()
        logger.info("everything is running after %.1f s", time.monotonic() - start)

    def _start_prometheus(self, directory: Path, port: int) -> None:
        """Start the program that answers /metrics; it ends with this process."""
        host, router = self.args.prometheus_host, self.args.sglang_router_ip
        if not is_free(host, port):
            raise UsageError(f"--prometheus-port {port} on {host} is taken, or no address of this host: give another")
        command = [sys.executable, "-m", "slime.dashboard.prometheus", str(directory), host, str(port)]
        if router is not None:  # one that runs already
            command.append(f"http://{router}:{self.args.sglang_router_port}")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        log, environment = directory / "logs" / "prometheus.log", os.environ | {"PYTHONPATH": path}
        use_keys(vars(self.parts.args).get("run_keys"), environment)  # routers and engines ask for them
        registry().start(command, name="prometheus endpoint", log_path=log, env=environment)
        logger.info("Prometheus scrapes this run at http://%s:%d/metrics", url_host(host), port)

    def _begin_events(self, directory: Path) -> None:
        self._events = logging_utils.RunEvents(directory)
        flags, words = vars(self.args), sys.orig_argv
        resume = shlex.join(command_line_without_secrets(line_to_go_on(words), flags)) if self.args.save else None
        self._events.start(shlex.join(command_line_without_secrets(words, flags)), resume, flags)
        self._tell("begin", phase=START)

    def _tell(self, event: str, **values: Any) -> None:
        """Write down what pages show (run_events.jsonl), once the run has begun."""
        if self._events is not None:
            self._events.write(event, **values)

    @phase(START)
    def _start_again(self) -> None:
        """Have new trainers and the data source resume from the newest checkpoint or from newer copies in memory, or
        begin again where there is neither. Engines stay if their manager is there."""
        parts = self.parts
        roles = [group.role for group in parts.groups]
        parts.end_trainers()
        parts.use_what_is_left(resumes=self._checkpoints.has_saved)
        copied = self._newest_copy(roles)
        self._checkpoints.forget_what_was_begun()
        evaluation, self._evaluation = self._evaluation, None
        self._announce_parts()
        started = parts.start_again(
            None if evaluation is None else evaluation[1],
            meanwhile=functools.partial(self.upkeep.serve_all, with_weights=False),
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
        """The rollout after which trainers can resume from copies in memory, where no checkpoint is as new."""
        owners = [owner for role in roles for owner in owners_of(role, self.parts.world_size)]
        copied = self._copies.newest(owners)
        saved = latest_iteration(self.args.save) if self._checkpoints.has_saved else None
        if copied is None and saved is None:
            logger.warning("there is no checkpoint of this run: it begins again with what it began with")
        return copied if copied is not None and (saved is None or copied > saved) else None

    def _connect(self, started: dict[str, Any], *, first: int | None = None) -> None:
        """Let trainers, data source and engines that were started know of each other.

        Args:
            started: what the trainers say.
            first: the first rollout, where that is not the one after what they have loaded.
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
        self._tell("plan", first=first, num_rollout=self.plan.num_rollout)
        if resumed_from >= 0 and not self.args.eval_only:
            left = f"going on at {first}" if first < self.plan.num_rollout else "it was the last: no rollout is left"
            logger.info("resumed from rollout %d; %s", resumed_from, left)
        # The parse checks this, too, but cannot count the rollouts of --num-epoch.
        refuse(check_critic_only_steps(self.args, self.plan.num_rollout))
        self._warn_of_no_profile(range(first, self.plan.num_rollout))
        if first > 0 and not self.args.eval_only:
            get(
                self._manager.load.remote(first - 1),
                f"the data source's state of rollout {first - 1}",
                STATE_DEADLINE_S,
            )
        if self._has_engines and self._has_trainers:  # without trainers the weights stay those that engines start with
            self._first_version = self.upkeep.version + 1
            get(self._manager.set_sync_schedule.remote(self._schedule), "the rollout manager", STATE_DEADLINE_S)
            if not self.upkeep.connect():
                logger.warning("no engine takes the trainer's weights: what is trained is not what generates")
            self._rollout_id = first
            self.sync_weights()

    @property
    def _schedule(self) -> SyncSchedule:
        plan = self.plan
        return SyncSchedule(
            plan.start_rollout_id, plan.num_rollout, self._sync_interval, self._first_version, self._stops_every
        )

    @property
    def _stops_every(self) -> tuple[int, ...]:
        """Periods of the rollouts after which this run may be resumed, where that must change nothing."""
        args = self.args
        if not args.deterministic or args.save is None:
            return ()
        saves = () if args.save_interval is None else (args.save_interval, self.plan.num_rollout_per_epoch)
        return tuple(period for period in (*saves, args.peer_checkpoint_interval) if period)

    def finish(self, *, failed: bool = False) -> None:
        """End everything that was started; after a failure without waiting for trainers that may be stuck.

        Trackers come last: they may have minutes of uploads left, in which nothing of the run should hold a GPU.
        """
        try_to_end("the status", self._status.end)
        if not failed:
            self._warn_of_no_profile(self._trained)
            try_to_end("the state of the last copies", self._checkpoints.forget_state_of_copy)
        if self._supervisor is not None:
            try_to_end("the watchdog", self._supervisor.before_end)
            if ray.is_initialized():
                if self._supervisor.lost_ray is None:
                    self._end_parts(graceful=not failed)
                try_to_end("Ray", self._supervisor.shut_ray_down)
        try_to_end("the uploads", self._checkpoints.end_uploads)
        try_to_end("the trackers", functools.partial(logging_utils.finish_tracking, failed=failed))
        if self._supervisor is not None:
            self._supervisor.end(failed=failed)
            self._supervisor = None
        while self._claimed:
            os.close(self._claimed.pop())

    def _end_parts(self, *, graceful: bool) -> None:
        if self.args.ray_timeline_path:
            try_to_end("the timeline", self._write_timeline)
        self.parts.end(graceful=graceful)
        try_to_end("the copies of trainers", self._copies.end)

    def _write_timeline(self) -> None:
        path = Path(self.args.ray_timeline_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ray.timeline()))
        logger.info("timeline of the Ray actors: %s", path)

    def _warn_of_no_profile(self, rollouts: range) -> None:
        args = self.args
        asked = range(args.profile_step_start, args.profile_step_end)
        if args.use_pytorch_profiler and (sentence := nothing_recorded(asked, rollouts)):
            logger.warning("%s", sentence)

    @property
    def args(self) -> Any:
        """The flags of the run as they are now."""
        return self.parts.args

    @property
    def trainers(self) -> RayTrainGroup:
        """The trainer ranks."""
        assert self.parts.actor is not None, "the run is not started: use it as a context manager"
        return self.parts.actor

    @property
    def turns(self) -> GpuTurns:
        """Who has the GPUs."""
        return self.parts.turns

    @property
    def _manager(self) -> Any:
        return self.parts.manager

    def _counts(self) -> list[Count]:
        if self._supervisor is None or self.parts.manager is None:
            return []
        said = progress_of(self._supervisor.run, MANAGER)
        return [(what, done, total) for what, done, total in said.get("under_way", ())]

    def _log_rollout_record(self, metrics: dict[str, float]) -> None:
        self._log([({**metrics, "rollout/step": self._rollout_id}, "rollout/step")])

    def _log(self, records: list[MetricRecord]) -> None:
        for metrics, step_key in records:
            logging_utils.log(self.args, metrics, step_key)
            self.metrics |= metrics
