"""What watches over a run from its first to its last moment: the mark of its processes, the sweeper that ends what is
left of them, the watch over Ray, and the watchdog that notices a stall.

`TrainingRun` tells it when Ray and the rollout manager are there; everything else it finds out by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime.observability.phases import Phase, Phases
from slime.ray import progress_board, stall_report
from slime.ray.ray_watch import Loss, RayLost, RayWatch
from slime.ray.stall_watch import StallWatch
from slime.ray.utils import get, interrupt_main
from slime.utils import stacks
from slime.utils.progress_counts import counts
from slime.utils.run_processes import MARK, begin_run
from slime.utils.sweeper import Sweeper, sweep_dead_runs

logger = logging.getLogger(__name__)

ASK_MANAGER_S = 20.0
LEAVE_S, LEAVE_RAY_S = 60.0, 10.0
"""How long a run that has to end may take for that by itself; without Ray there is little that it could still do."""
EXIT_FAILED = 1


class RunStalled(RuntimeError):
    """Nothing went on any more, and --on-stall says that this ends the run; the message names the phase and the
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
        self.lost_ray: RayLost | None = None
        """Why the Ray that the run is in must not be called any more: calls may block for ever."""
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
        stacks.can_be_asked()
        if self._stall_timeout_s:
            self._watch = StallWatch(
                self._phases, self._look, self._engine_state, self._report, timeout_s=self._stall_timeout_s
            )
            self._watch.start()

    def cause(self, error: BaseException) -> BaseException:
        """Return why the run ends: `error`, or, where Ray is gone, that: it is what is behind the error then."""
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
            progress_board.clear(self.run)

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
        """The run is over, and everything of it that can be told to end was told."""
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
        board = progress_board.read(self.run)
        done = {name: (said.get("counts"), said.get("begun")) for name, said in board.items()}
        return done, counts()

    def _engine_state(self) -> dict[str, Any]:
        if (manager := self._manager()) is None:
            return {}
        found: dict[str, Any] = get(manager.engine_state.remote(), "the state of the engines", ASK_MANAGER_S)
        return found

    def _report(self, phase: Phase, limit_s: float) -> None:
        path = self._output_dir / stall_report.FILE
        headline = stall_report.headline(phase, limit_s, self._stopped())
        message = f"{headline}: what every process is doing is in {path}"
        logger.error("%s", message)
        stall_report.write_report(path, headline, self._sections())
        if self._on_stall == "report":
            logger.error("the run goes on waiting (--on-stall report)")
            return
        interrupt_main(RunStalled(message))
        self._leave_after(LEAVE_S, message)

    def _stopped(self) -> list[str]:
        try:
            board = progress_board.read(self.run)
        except Exception as error:  # noqa: BLE001 - a boundary: who cannot be asked must not keep the report away
            logger.warning("processes cannot be named: %s", error)
            board = {}
        return stall_report.stopped_processes(self.run, board)

    def _sections(self) -> dict[str, Any]:
        directory = str(self._output_dir)

        def board() -> dict[str, Any]:
            return progress_board.read(self.run)

        return {
            "Phases so far": lambda: "\n".join(self._phases.history()),
            "Progress": lambda: stall_report.progress_lines(board()),
            "Engines and their queues": lambda: stall_report.engine_lines(self._engine_state()),
            "Collectives of the trainer": lambda: stall_report.collective_lines(board()),
            "This node: memory, and every process of the run": lambda: stall_report.of_node(
                self.run, directory, [os.getpid()]
            ),
            "Other nodes": lambda: stall_report.of_other_nodes(self.run, directory),
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
