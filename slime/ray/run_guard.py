"""The supervision of a run from its first to its last moment: the mark of its processes, the sweeper that ends what is
left of them, the watch over Ray, and the watchdog that notices a stall (slime.ray.stalls).

`TrainingRun` says when Ray and the rollout manager are there; the guard finds out everything else by itself.

Ray (2.55) reports its own loss to its driver late, or never: a raylet that was killed shows as an actor that "is
unavailable" or died, one that is stopped not at all, and calls that need it block whatever timeout they are given
(`ray.get`, `ray.put`, `ray.shutdown`); a GCS that was killed ends the driver after 60 s without a word of the run's.
So a thread (`RayWatch`) looks at both. Raylets of other nodes are the GCS's business, which declares their nodes dead
(`ActorLost`).

Wait graph: a look waits `ANSWER_S` for the GCS; nobody waits for the watch but `stop`, for one look.
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

from slime.observability.phases import Phase, Phases
from slime.processes.progress import counts, write_stacks_on_signal
from slime.processes.registry import MARK, begin_run
from slime.processes.sweeper import Sweeper, sweep_dead_runs
from slime.processes.wait import Watch, try_and_log
from slime.ray import stalls
from slime.ray.stalls import StallWatch
from slime.ray.utils import get, interrupt_main

logger = logging.getLogger(__name__)

ASK_MANAGER_S = 20.0
# How long a run that has to end may take for that by itself; without Ray there is little that it could still do.
LEAVE_S, LEAVE_RAY_S = 60.0, 10.0
EXIT_FAILED = 1


class RunStalled(RuntimeError):
    """Nothing made progress any more, and --on-stall says that this ends the run; the message names the phase and the
    report."""


class RunGuard:
    """The guard of one run.

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
            self._sweeper.say(f"ray {own_folder}")
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
                self._phases, self._look, self._engine_state, self._report, timeout_s=self._stall_timeout_s
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
            stalls.clear_progress(self.run)

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
            self._sweeper.say("well")
        self._sweeper.say("end")
        if os.environ.get(MARK) == self.run:
            del os.environ[MARK]

    def _leave_after(self, seconds: float, message: str) -> None:
        """End this process after so many seconds unless `_stay` is called before: its own end may hang as well."""
        self._stay()
        self._end_anyway = threading.Timer(seconds, _leave, (message, seconds))
        self._end_anyway.daemon = True
        self._end_anyway.start()

    def _stay(self) -> None:
        if self._end_anyway is not None:
            self._end_anyway.cancel()

    # ---- the watch over Ray

    def _lose_ray(self, loss: Loss) -> None:
        if self.lost_ray is not None:
            return
        log = self._logs_of_ray / loss.log
        self.lost_ray = RayLost(f"{loss.what}, and the run cannot go on without it; its log: {log}")
        logger.error("%s", self.lost_ray)
        interrupt_main(self.lost_ray)
        self._leave_after(LEAVE_RAY_S, str(self.lost_ray))

    # ---- the watchdog

    def _look(self) -> Any:
        board = stalls.read_progress(self.run)
        done = {name: (said.get("counts"), said.get("begun")) for name, said in board.items()}
        return done, counts()

    def _engine_state(self) -> dict[str, Any]:
        if (manager := self._manager()) is None:
            return {}
        return get(manager.engine_state.remote(), "the state of the engines", ASK_MANAGER_S)

    def _report(self, phase: Phase, limit_s: float) -> None:
        path = self._output_dir / stalls.FILE
        headline = stalls.headline(phase, limit_s, self._stopped())
        message = f"{headline}: what every process is doing is in {path}"
        logger.error("%s", message)
        try:
            stalls.write_report(path, headline, self._sections())
        except OSError as error:  # a full disk must not keep a stalled run going
            logger.error("the report cannot be written: %s", error)
        if self._on_stall == "report":
            logger.error("the run goes on waiting (--on-stall report)")
            return
        interrupt_main(RunStalled(message))
        self._leave_after(LEAVE_S, message)

    def _stopped(self) -> list[str]:
        board = try_and_log("asking which processes there are", lambda: stalls.read_progress(self.run)) or {}
        return stalls.stopped_processes(self.run, board)

    def _sections(self) -> dict[str, Any]:
        directory = str(self._output_dir)

        def board() -> dict[str, Any]:
            return stalls.read_progress(self.run)

        return {
            "Phases so far": lambda: "\n".join(self._phases.history()),
            "Progress": lambda: stalls.progress_lines(board()),
            "Engines and their queues": lambda: stalls.engine_lines(self._engine_state()),
            "Collectives of the trainer": lambda: stalls.collective_lines(board()),
            "This node: memory, and every process of the run": lambda: stalls.of_node(
                self.run, directory, [os.getpid()]
            ),
            "Other nodes": lambda: stalls.of_other_nodes(self.run, directory),
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


PERIOD_S = 1.0
ANSWER_S = 5.0
# How long the raylet may be stopped, or the GCS not answer, before Ray counts as lost: it may come back.
SILENT_S = 30.0


class RayLost(RuntimeError):
    """The Ray that the run is in does not work any more; the message says what of it, and where its log is."""


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
        self._on_loss = on_loss
        self._processes = processes
        self._is_known = is_known
        self._node = node
        self._clock = clock
        self._last_look = clock()
        self._silent_s = 0.0

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
