"""Symbolic equality with a time limit, by a child process that can be killed.

It knows the child's protocol (`sympy_worker.py`), nothing about answers. A thread could not be stopped and a signal
handler works in the main thread only; a child can be ended wherever sympy is.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_LIMIT_S = 2.0
MAX_WORKERS = 2
END_S = 10.0
TURN_S = 3600.0
"""For a free child: each check has its limit, but thousands may wait."""


class _Worker:
    """One child; started on first use and again after a check that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, a: str, b: str, limit_s: float) -> bool | None:
        """The child's verdict, or None when it died on the check."""
        child = self._running()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the sympy child has no pipes")
        try:
            child.stdin.write(json.dumps({"a": a, "b": b, "limit_s": limit_s}) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.end()
            return None
        return answer.strip() == "1"

    def end(self) -> None:
        """Kill the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)  # it was killed
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            script = Path(__file__).with_name("sympy_worker.py")
            # -P: the script's directory must not come first on the path, its module names are no top-level names
            command = [sys.executable, "-P", str(script)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            ready = self._process.stdout.readline() if self._process.stdout else ""
            if ready.strip() != "ready":
                raise RuntimeError("the sympy child did not start; is sympy installed? (pip install sympy)")
        return self._process


class _Pool:
    """The children of this process; each serves one thread at a time."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(MAX_WORKERS)]
        for worker in self._workers:
            self._idle.put(worker)
        atexit.register(self.end)

    def is_equal(self, a: str, b: str, limit_s: float) -> bool | None:
        worker = self._idle.get(timeout=TURN_S)
        try:
            return worker.is_equal(a, b, limit_s)
        finally:
            self._idle.put(worker)

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


_pool = _Pool()


def is_symbolically_equal(a: str, b: str, *, limit_s: float = CHECK_LIMIT_S) -> bool:
    """Whether `a - b` simplifies to zero within `limit_s`; a check that takes longer counts as False and is logged.

    Blocks the calling thread for up to the limit (plus about 2 s for the first check of a process).
    """
    verdict = _pool.is_equal(a, b, limit_s)
    if verdict is None:
        logger.warning("sympy check stopped after %.1f s, counted as wrong: %.80r against %.80r", limit_s, a, b)
    return bool(verdict)
