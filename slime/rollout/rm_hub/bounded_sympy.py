"""Symbolic equality with a time limit, by a child process that can be killed.

It knows the child's protocol (`sympy_worker.py`), nothing about answers. A thread could not be stopped and a signal
handler works in the main thread only; a child can be ended wherever sympy is.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import select
import subprocess
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_LIMIT_S = 2.0
MAX_WORKERS = 2
END_S = 10.0
START_S = 60.0  # Until a child has imported sympy: a second or two, on a busy machine with cold files many more
# On top of a check's limit, which the kernel holds the child to: a child that is later than this was stopped
ANSWER_MARGIN_S = 10.0
TURN_S = 3600.0  # For a free child: each check has its limit, but thousands may wait


class _Late(Exception):
    """The child did nothing until the deadline."""


class _Worker:
    """One child; started on first use and again after a check that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def is_equal(self, a: str, b: str, limit_s: float) -> bool | None:
        """The child's verdict, or None when it died on the check, or was stopped and then ended."""
        child, request = self._running(), json.dumps({"a": a, "b": b, "limit_s": limit_s}) + "\n"
        allowed_s = limit_s + ANSWER_MARGIN_S
        try:
            answer = _answer_of(child, request.encode(), allowed_s)
        except BrokenPipeError:
            answer = ""
        except _Late:
            logger.error("the sympy child %d did not answer within %.0f s and was ended", child.pid, allowed_s)
            answer = ""
        if not answer:
            self.end()
            return None
        return answer == "1"

    def end(self) -> None:
        """Kill the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)  # it was killed
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            try:
                said = _answer_of(self._process, b"", START_S)
            except _Late:
                self.end()
                raise RuntimeError(f"the sympy child was not ready within {START_S:.0f} s and was ended") from None
            if said != "ready":
                self.end()
                raise RuntimeError("the sympy child did not start; is sympy installed? (pip install sympy)")
        return self._process


def _start() -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("sympy_worker.py")
    # -P: the script's directory must not come first on the path, its module names are no top-level names
    command = [sys.executable, "-P", str(script)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return child


def _answer_of(child: subprocess.Popen[bytes], request: bytes, limit_s: float) -> str:
    """Write a request, which a stopped child would not take either, and read the line that answers it.

    Returns:
        the line, or nothing when the child ended before.

    Raises:
        _Late: neither came within `limit_s`.
        BrokenPipeError: the child ended before it took the request.
    """
    assert child.stdin is not None and child.stdout is not None
    end, source, sink = time.monotonic() + limit_s, child.stdout.fileno(), child.stdin.fileno()
    while request:
        _wait_for(sink, select.POLLOUT, end)
        request = request[os.write(sink, request) :]
    answer = b""
    while not answer.endswith(b"\n"):
        _wait_for(source, select.POLLIN, end)
        if not (more := os.read(source, 4096)):
            return ""
        answer += more
    return answer.decode().strip()


def _wait_for(descriptor: int, event: int, end: float) -> None:
    poll = select.poll()  # not select.select, which takes no descriptor above 1023
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
        raise _Late


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
