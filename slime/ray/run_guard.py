"""What watches over a run from its first to its last moment: the mark of its processes, the sweeper that ends what is
left of them, and the watchdog that notices a stall.

`TrainingRun` tells it when Ray and the rollout manager are there; everything else it finds out by itself. It knows
nothing about rollouts or weights.
"""

from __future__ import annotations

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
from slime.ray.stall_watch import StallWatch
from slime.ray.utils import get, interrupt_main
from slime.utils import stacks
from slime.utils.progress_counts import counts
from slime.utils.run_processes import MARK, begin_run
from slime.utils.sweeper import Sweeper

logger = logging.getLogger(__name__)

ASK_MANAGER_S = 20.0
LEAVE_S = 60.0
EXIT_STALLED = 1


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
        self._end_anyway: threading.Timer | None = None
        self.run = begin_run()
        self._sweeper = Sweeper(self.run, output_dir)

    def watch(self, manager: Callable[[], Any], *, started_ray: bool) -> None:
        """Begin: Ray runs, and the rollout manager is starting.

        Args:
            manager: returns the rollout manager's handle, which another one may take the place of.
            started_ray: this process has started Ray, whose session ends with the run.
        """
        self._manager = manager
        if started_ray and (session := _session_dir()):
            self._sweeper.say(f"session {session}")
        stacks.can_be_asked()
        if self._stall_timeout_s:
            self._watch = StallWatch(
                self._phases, self._look, self._engine_state, self._report, timeout_s=self._stall_timeout_s
            )
            self._watch.start()

    def before_end(self) -> None:
        """The run is ending: nothing is watched any more. To be called while Ray still runs."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            interrupt_main(None)
        if ray.is_initialized():
            progress_board.clear(self.run)

    def end(self, *, failed: bool) -> None:
        """The run is over, and everything of it that can be told to end was told."""
        if self._end_anyway is not None:
            self._end_anyway.cancel()
        if not failed:
            self._sweeper.say("well")
        self._sweeper.say("end")
        if os.environ.get(MARK) == self.run:
            del os.environ[MARK]

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
        self._end_anyway = threading.Timer(LEAVE_S, _leave, (message,))
        self._end_anyway.daemon = True
        self._end_anyway.start()

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


def _leave(message: str) -> None:
    """End a driver whose own end hangs as well; the sweeper ends what is left."""
    sys.stderr.write(f"error: {message}; the run did not end by itself within {LEAVE_S:.0f} s\n")
    sys.stderr.flush()
    os._exit(EXIT_STALLED)


def _session_dir() -> str | None:
    """Directory of the Ray session that this process has started."""
    node = ray._private.worker._global_node
    return str(node.get_session_dir_path()) if node is not None else None
