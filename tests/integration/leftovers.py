"""What a run holds of its machine, and what of that is still there after its end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil

from slime.processes.registry import shared_memory_of

LEFT_S = 60.0
"""A safety net: the sweeper's ten seconds are held on a machine that is not busy."""
MARK = "SLIME_TEST_MARK"
_SESSION = re.compile(r"=(/\S*/session_\d[^/\s]*)")


class Holdings:
    """Processes with a mark in their environment (and their children), and what they hold; `look` adds to it.

    Args:
        mark: value of the variable `MARK` in the driver's environment, which all inherit.
    """

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self.processes: dict[int, psutil.Process] = {}
        self.ports: set[int] = set()
        self.memory: set[Path] = set()
        self.sessions: set[Path] = set()

    def look(self) -> None:
        """See what there is now."""
        marked = [process for process in psutil.process_iter(["cmdline", "ppid"]) if self._is_marked(process)]
        self.processes |= {process.pid: process for process in marked}
        self.memory |= shared_memory_of(self.processes, since=0.0)
        for process in marked:
            self.sessions |= {Path(found) for found in _SESSION.findall(" ".join(process.info["cmdline"] or []))}
        self.ports |= {
            one.laddr.port
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.pid in self.processes
        }

    def left(self) -> list[str]:
        """What of it is still there, and what bears the mark by now."""
        self.look()
        listening = {  # a port may be somebody else's by now
            one.laddr.port
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and (one.pid is None or one.pid in self.processes)
        }
        return [
            *(f"process {one.pid} {name}" for one in self.processes.values() if (name := _name_of_living(one))),
            *(f"port {port}" for port in self.ports & listening),
            *(f"shared memory {path}" for path in self.memory if path.exists()),
            *(f"Ray session {path}" for path in self.sessions if path.exists()),
        ]

    def wait_until_gone(self, seconds: float = LEFT_S) -> list[str]:
        """What is left after so many seconds."""
        end = time.monotonic() + seconds
        while (found := self.left()) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def _is_marked(self, process: psutil.Process) -> bool:
        if process.info["ppid"] in self.processes:
            return True
        try:
            return self._mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _name_of_living(process: psutil.Process) -> str | None:
    try:
        is_alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return process.name() if is_alive else None
    except psutil.NoSuchProcess:
        return None
