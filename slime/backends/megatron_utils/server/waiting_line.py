"""Requests that wait for the model: a bounded line, first come, first served, taken as many at a time as fit together.

HTTP handlers put jobs in, the model's loop takes them out; a job whose client went away is dropped. It knows nothing
about either.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class LineFull(Exception):
    """As many requests wait as may."""


@dataclass
class Job:
    """Something for the model to do.

    Attributes:
        work: what; a job that is `alone` is never taken together with others.
        num_tokens: how much of a batch it fills.
        result: gets the outcome.
    """

    work: Any
    num_tokens: int = 0
    alone: bool = False
    result: Future[Any] = field(default_factory=Future)


class WaitingLine:
    """See the module.

    Args:
        max_jobs: that may wait.
        max_tokens: of the jobs that are taken together; one job may have more.
    """

    def __init__(self, max_jobs: int, max_tokens: int) -> None:
        self._jobs: deque[Job] = deque()
        self._max_jobs, self._max_tokens = max_jobs, max_tokens
        self._changed = threading.Condition()

    def put(self, job: Job) -> None:
        """Let a job wait.

        Raises:
            LineFull: too many do already.
        """
        with self._changed:
            if len(self._jobs) >= self._max_jobs:
                raise LineFull(f"{self._max_jobs} requests wait already")
            self._jobs.append(job)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Job]:
        """The next jobs, as many from the head as fit together; none after `timeout_s` without any."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs), timeout_s)
            taken: list[Job] = []
            while self._jobs and self._fits(taken, self._jobs[0]):
                job = self._jobs.popleft()
                if job.result.set_running_or_notify_cancel():
                    taken.append(job)
            return taken

    def _fits(self, taken: list[Job], job: Job) -> bool:
        if not taken:
            return True
        if job.alone or taken[0].alone:
            return False
        return sum(other.num_tokens for other in taken) + job.num_tokens <= self._max_tokens

    def counts(self) -> tuple[int, int]:
        """(jobs that wait, their tokens)."""
        with self._changed:
            return len(self._jobs), sum(job.num_tokens for job in self._jobs)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every job that waits with an error."""
        with self._changed:
            while self._jobs:
                job = self._jobs.popleft()
                if job.result.set_running_or_notify_cancel():
                    job.result.set_exception(make_error())
