"""The watch over Ray itself: a thread of the driver that notices when this node's raylet or the GCS is gone or silent.

Ray (2.55) tells its driver late, or never: a raylet that was killed shows as an actor that "is unavailable" or died,
one that is stopped not at all, and calls that need it block whatever timeout they are given (`ray.get`, `ray.put`,
`ray.shutdown`); a GCS that was killed ends the driver after 60 s without a word of the run's. Raylets of other nodes
are the GCS's business, which declares their nodes dead (`ActorLost`).

Wait graph: a look waits `ANSWER_S` for the GCS; nobody waits for the watch but `stop`, for one look.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import psutil
import ray
from ray import NodeID

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
ANSWER_S = 5.0
SILENT_S = 30.0
"""How long the raylet may be stopped, or the GCS not answer, before Ray counts as lost: it may come back."""


class RayLost(RuntimeError):
    """The Ray that the run is in does not work any more; the message says what of it, and where its log is."""


class Loss(NamedTuple):
    """A part of Ray that does not work, as a clause, and the file of Ray's logs that may say why."""

    what: str
    log: str


class RayWatch:
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
        self._on_loss = on_loss
        self._processes = processes
        self._is_known = is_known
        self._node = node
        self._clock = clock
        self._last_look = clock()
        self._silent_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)

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

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. To be called before Ray is shut down."""
        self._over.set()
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
        except Exception as error:  # noqa: BLE001 - Ray's own error classes for this are private
            return Loss(f"Ray's GCS has not answered ({str(error).partition(chr(10))[0]})", "gcs_server.out")
        return None

    def _title(self, name: str) -> str:
        what = "GCS" if name == "gcs_server" else name
        return f"Ray's {what} (process {self._processes[name].pid} on {self._node})"

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            if (loss := self.look()) is not None:
                self._on_loss(loss)
                return


def _status(process: psutil.Process) -> str | None:
    """Return the status of a process; None once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() if process.is_running() else None
    return None
