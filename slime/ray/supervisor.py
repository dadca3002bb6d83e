"""The supervision of a run from its first to its last moment: the mark of its processes, the sweeper that ends what is
left of them, the watch over Ray, and the watchdog for stalls (--stall-timeout; docs/stalls.md reads its report).

`RunLifetime` says when Ray and the rollout manager are there; the supervisor finds out everything else by itself.

Ray (2.55) reports its own loss to its driver late, or never: a raylet that was killed shows as an actor that "is
unavailable" or died, one that is stopped not at all, and calls that need it block whatever timeout they are given
(`ray.get`, `ray.put`, `ray.shutdown`); a GCS that was killed ends the driver after 60 s without a word of the run's.
So a thread (`RayWatch`) looks at both. Raylets of other nodes are the GCS's business, which declares their nodes dead
(`ActorLost`). Stalls are another thread's (`StallWatch`), because its looks need Ray:

1. Every process publishes its counts (`publish_progress`); one that is stopped or holds the interpreter's lock falls
   silent.
2. A phase is stalled when it has made no progress for six times its own median, `--stall-timeout` at least. It is
   reported once. The report asks with deadlines and writes down what does not answer; it changes nothing.

Wait graph: a look at Ray waits `ANSWER_S` for the GCS, one for stalls has deadlines of its own; nobody waits for a
watch but `stop`, for one look.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import ray
from ray import NodeID
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.observability.phases import Phase, Phases
from slime.processes.progress import (
    collective_lines,
    counts,
    describe_run,
    engine_lines,
    progress_lines,
    write_report,
    write_stacks_on_signal,
)
from slime.processes.registry import MARK, begin_run
from slime.processes.sweeper import Sweeper, note, sweep_dead_runs
from slime.processes.wait import Watch, try_and_log
from slime.ray.utils import actor_env, forget_progress, get, interrupt_main, read_progress

logger = logging.getLogger(__name__)

REPORT = "stall_report.txt"
ASK_MANAGER_S, ASK_NODE_S = 20.0, 90.0
# How long a run that has to end may take for that by itself; without Ray there is little that it could still do.
LEAVE_S, LEAVE_RAY_S = 60.0, 10.0
EXIT_FAILED = 1
PERIOD_S, ANSWER_S = 1.0, 5.0
# How long the raylet may be stopped, or the GCS not answer, before Ray counts as lost: it may come back.
SILENT_S = 30.0
SLOW = {"start": 900.0}  # Phases that count nothing while they work: processes start and weights are read.
LOOKS = 10  # Looks within the time that a phase may be silent for.


class RunStalled(RuntimeError):
    """Nothing made progress any more, and --on-stall says that this ends the run; the message names the phase and the
    report."""


class RayLost(RuntimeError):
    """The Ray that the run is in does not work any more; the message says what of it, and where its log is."""


class Supervisor:
    """The supervisor of one run.

    Args:
        phases: of the run.
        output_dir: of the run.
        stall_timeout_s: the least time that a phase may be silent for; 0 watches nothing.
        on_stall: "abort" ends a stalled run, "report" only reports.
    """

    def __init__(self, phases: Phases, output_dir: Path, *, stall_timeout_s: float, on_stall: str) -> None:
        self._phases = phases
        self._output_dir = output_dir
        self._stall_timeout_s = stall_timeout_s
        self._on_stall = on_stall
        self._manager: Callable[[], Any] = lambda: None
        self._watch: StallWatch | None = None
        self._ray_watch: RayWatch | None = None
        self._logs_of_ray = output_dir / "logs" / "ray"
        self._end_anyway: threading.Timer | None = None
        # Why the Ray that the run is in must not be called any more: calls may block for ever.
        self.lost_ray: RayLost | None = None
        for sentence in sweep_dead_runs():
            logger.warning("%s", sentence)
        self.run = begin_run()
        self._sweeper = Sweeper(self.run, output_dir)

    def watch_ray(self, own_folder: Path | None) -> None:
        """Begin to watch over the Ray that this process has just connected to.

        Args:
            own_folder: of a Ray that this process has started; it goes with the run.
        """
        if ray._private.worker._global_node is None:  # a Ray client: nothing of that Ray can be seen from here
            logger.warning("the loss of this Ray cannot be noticed through its client; `ray job submit` can")
            return
        if own_folder is not None:
            note(self._sweeper.record, "ray", own_folder)
        else:
            self._logs_of_ray = Path(ray._private.worker._global_node.get_logs_dir_path())
        self._ray_watch = RayWatch.of_this_node(self._lose_ray)
        self._ray_watch.start()

    def watch(self, manager: Callable[[], Any]) -> None:
        """Begin to watch for stalls: the rollout manager is starting.

        Args:
            manager: returns the rollout manager's handle, which another one may take the place of.
        """
        self._manager = manager
        write_stacks_on_signal()
        if self._stall_timeout_s:
            self._watch = StallWatch(
                self._phases, self._look, self._engine_state, self.report, timeout_s=self._stall_timeout_s
            )
            self._watch.start()

    def cause(self, error: BaseException) -> BaseException:
        """Return why the run ends: `error`, or, where Ray is gone, that, which has caused the error."""
        if self.lost_ray is None and self._ray_watch is not None and (loss := self._ray_watch.gone()) is not None:
            self._lose_ray(loss)
        return self.lost_ray if self.lost_ray is not None and isinstance(error, Exception) else error

    def before_end(self) -> None:
        """The run is ending: nothing is watched for stalls any more. To be called while Ray still runs."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            interrupt_main(None)
        if ray.is_initialized() and self.lost_ray is None:
            forget_progress(self.run)

    def shut_ray_down(self) -> None:
        """Do what `ray.shutdown` does, where Ray can still do it; without it the process ends as well."""
        if self._ray_watch is not None:
            self._ray_watch.stop()
        interrupt_main(None)
        if self.lost_ray is None:
            self._leave_after(LEAVE_S, "Ray was not shut down")
            ray.shutdown()
        else:
            # ray.shutdown, which Ray calls at exit, too, would block on a raylet or a GCS that is stopped; without it
            # the orderly end of the interpreter crashes now and then.
            atexit.register(_exit_at_once)
        self._stay()

    def end(self, *, failed: bool) -> None:
        """The run is over: everything of it that can be ended was asked to end."""
        self._stay()
        if not failed:
            note(self._sweeper.record, "well", self._output_dir)
        self._sweeper.sweep()
        if os.environ.get(MARK) == self.run:
            del os.environ[MARK]

    def report(self, phase: Phase, limit_s: float) -> None:
        """Write the report of a stalled phase, and end the run unless --on-stall says otherwise.

        Args:
            phase: that has made no progress.
            limit_s: how long it may be silent for.
        """
        path, headline = self._output_dir / REPORT, phase.silence(limit_s)
        message = f"{headline}: what every process is doing is in {path}"
        logger.error("%s", message)
        try:
            write_report(path, headline, self._sections())
        except OSError as error:  # a full disk must not keep a stalled run going
            logger.error("the report cannot be written: %s", error)
        if self._on_stall == "report":
            logger.error("the run goes on waiting (--on-stall report)")
            return
        interrupt_main(RunStalled(message))
        self._leave_after(LEAVE_S, message)

    def _leave_after(self, seconds: float, message: str) -> None:
        """End this process after so many seconds unless `_stay` is called before: its own end may hang as well."""
        self._stay()
        self._end_anyway = threading.Timer(seconds, _leave, (message, seconds))
        self._end_anyway.daemon = True
        self._end_anyway.start()

    def _stay(self) -> None:
        if self._end_anyway is not None:
            self._end_anyway.cancel()

    def _lose_ray(self, loss: Loss) -> None:
        if self.lost_ray is not None:
            return
        log = self._logs_of_ray / loss.log
        self.lost_ray = RayLost(f"{loss.what}, and the run cannot go on without it; its log: {log}")
        logger.error("%s", self.lost_ray)
        interrupt_main(self.lost_ray)
        self._leave_after(LEAVE_RAY_S, str(self.lost_ray))

    def _look(self) -> Any:
        board = read_progress(self.run)
        return {name: (said.get("counts"), said.get("begun")) for name, said in board.items()}, counts()

    def _engine_state(self) -> dict[str, Any]:
        if (manager := self._manager()) is None:
            return {}
        return get(manager.engine_state.remote(), "the state of the engines", ASK_MANAGER_S)

    def _sections(self) -> dict[str, Callable[[], str]]:
        directory = str(self._output_dir)
        return {
            "Phases so far": lambda: "\n".join(self._phases.history()),
            "Progress": lambda: progress_lines(read_progress(self.run)),
            "Engines and their queues": lambda: engine_lines(self._engine_state()),
            "Collectives of the trainer": lambda: collective_lines(read_progress(self.run)),
            "This node: memory, and every process of the run": lambda: describe_run(
                self.run, directory, [os.getpid()]
            ),
            "Other nodes": lambda: describe_other_nodes(self.run, directory),
        }


def _leave(message: str, seconds: float) -> None:
    """End a driver whose own end hangs as well; the sweeper ends what is left."""
    sys.stderr.write(f"error: {message}; the run did not end by itself within {seconds:.0f} s\n")
    _exit_at_once()


def _exit_at_once() -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_FAILED)


class Loss(NamedTuple):
    """A part of Ray that does not work, as a clause, and the file of Ray's logs that may say why."""

    what: str
    log: str


class RayWatch(Watch):
    """A watch over the raylet of this node and over the GCS.

    Args:
        on_loss: called once, in the watch's thread.
        processes: those of them that are on this node, by name.
        is_known: whether the GCS counts this node as alive; raises when it does not answer.
        node: address of this node.
        clock: seconds, from anywhere.
    """

    def __init__(
        self,
        on_loss: Callable[[Loss], None],
        processes: Mapping[str, psutil.Process],
        is_known: Callable[[], bool],
        node: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("ray-watch", every_s=PERIOD_S)
        self._on_loss, self._processes, self._is_known, self._node = on_loss, processes, is_known, node
        self._clock, self._last_look, self._silent_s = clock, clock(), 0.0

    @classmethod
    def of_this_node(cls, on_loss: Callable[[Loss], None]) -> Self:
        """Return the watch over the Ray that this process is connected to."""
        node, client = ray._private.worker._global_node, ray._private.worker.global_worker.gcs_client
        words = {
            "raylet": f"--raylet_socket_name={node.raylet_socket_name}",
            "gcs_server": f"--log_dir={node.get_logs_dir_path()}",
        }
        processes = {}
        for process in psutil.process_iter(["name", "cmdline"]):
            name = process.info["name"]
            if name in words and words[name] in (process.info["cmdline"] or []):
                processes[name] = process
        node_id = NodeID.from_hex(ray.get_runtime_context().get_node_id())
        return cls(
            on_loss,
            processes,
            lambda: client.check_alive([node_id], timeout=ANSWER_S)[0],
            ray.util.get_node_ip_address(),
        )

    def stop(self) -> None:
        """End. To be called before Ray is shut down."""
        super().stop()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_S)

    def gone(self) -> Loss | None:
        """Return which process has ended, at once and without asking anybody."""
        for name, process in self._processes.items():
            if _status(process) in (None, psutil.STATUS_ZOMBIE):
                return Loss(f"{self._title(name)} is gone (dmesg says whether the kernel ended it)", f"{name}.out")
        return None

    def look(self) -> Loss | None:
        """Look once; returns what is lost, also what has been silent for too long."""
        # A driver that was stopped itself must not count that time as Ray's silence.
        passed_s = min(self._clock() - self._last_look, ANSWER_S + PERIOD_S)
        self._last_look = self._clock()
        if (loss := self.gone()) is not None:
            return loss
        if (silent := self._silent()) is None:
            self._silent_s = 0.0
            return None
        if not self._silent_s:
            logger.warning("%s; the run waits %.0f s for it", silent.what, SILENT_S)
        self._silent_s += passed_s
        return Loss(f"{silent.what} for {SILENT_S:.0f} s", silent.log) if self._silent_s >= SILENT_S else None

    def _silent(self) -> Loss | None:
        for name, process in self._processes.items():
            if _status(process) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return Loss(f"{self._title(name)} has been stopped (SIGCONT lets it go on)", f"{name}.out")
        try:
            if not self._is_known():
                return Loss(f"Ray's GCS has counted this node ({self._node}) as dead", "gcs_server.out")
        except (RayError, OSError, RuntimeError) as error:
            return Loss(f"Ray's GCS has not answered ({str(error).partition(chr(10))[0]})", "gcs_server.out")
        return None

    def _title(self, name: str) -> str:
        what = "GCS" if name == "gcs_server" else name
        return f"Ray's {what} (process {self._processes[name].pid} on {self._node})"

    def tick(self) -> None:
        """Look, and end with the first loss."""
        if (loss := self.look()) is not None:
            super().stop()
            self._on_loss(loss)


def _status(process: psutil.Process) -> str | None:
    """Return the status of a process; None once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() if process.is_running() else None
    return None


class StallWatch(Watch):
    """A watch over phases.

    Args:
        phases: of the run.
        look: something that changes when anything is done.
        look_closely: likewise, at a cost: it is asked only in a phase that has been silent for half its time.
        on_stall: called in the watch's thread with the phase that stalled and how long it may be silent for.
        timeout_s: the least time that a phase may be silent for.
    """

    def __init__(
        self,
        phases: Phases,
        look: Callable[[], Any],
        look_closely: Callable[[], Any],
        on_stall: Callable[[Phase, float], None],
        *,
        timeout_s: float,
    ) -> None:
        super().__init__("stall-watch", every_s=max(0.05, min(30.0, timeout_s / LOOKS)))
        self._phases, self._looks, self._on_stall, self._timeout_s = phases, (look, look_closely), on_stall, timeout_s
        self._seen: dict[Callable[[], Any], Any] = {}
        self._is_reported = False

    def tick(self) -> None:
        """Look once."""
        phase = self._phases.current()
        if phase is None:
            return
        limit_s = self._phases.limit_s(phase.name, max(self._timeout_s, SLOW.get(phase.name, 0.0)))
        looks = self._looks if phase.silent_s >= limit_s / 2 else self._looks[:1]
        changed = [self._has_changed(look) for look in looks]  # each: the next look compares with what there is now
        if any(changed):
            self._phases.went_on()
        if any(changed) or phase.silent_s < limit_s:
            self._is_reported = False
        elif not self._is_reported:
            self._is_reported = True
            self._on_stall(phase, limit_s)

    def _has_changed(self, look: Callable[[], Any]) -> bool:
        found = try_and_log("a look of the watchdog", look, level=logging.DEBUG)
        if found is None:
            return False
        before, self._seen[look] = self._seen.get(look, found), found
        return bool(before != found)


def describe_other_nodes(run: str, directory: str) -> str:
    """Return `describe_run` of every other node of the cluster, by a Ray task on each."""
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    asked = {
        node["NodeManagerAddress"]: ray.remote(describe_run)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": actor_env()},
        )
        .remote(run, directory)
        for node in others
    }
    end, texts = time.monotonic() + ASK_NODE_S, []
    for address, ref in asked.items():
        try:
            text = ray.get(ref, timeout=max(0.1, end - time.monotonic()))
        except RayError as error:  # also a deadline: what a node cannot tell must not hide the others
            text = f"(not there: {error})"
        texts.append(f"-- node {address}\n{text}")
    return "\n".join(texts) or "the run has one node"
