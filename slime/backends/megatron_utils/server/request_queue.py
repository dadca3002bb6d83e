"""The queue of requests for the model, and the loop of all ranks that works on them.

The queue is bounded; jobs are taken first come, first served, as many at a time as fit together. HTTP handlers put
them in, rank 0's loop takes them out and tells the other ranks; a job whose client went away is dropped. Rank 0 speaks
at least every `HEARTBEAT_S` seconds, so that a rank that waits for it can tell an idle server from a dead one (the
collective's own time limit).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import UsageError

if TYPE_CHECKING:
    from slime.backends.megatron_utils.server.protocol import ScoreRequest
    from slime.backends.megatron_utils.server.scoring import Scorer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
POLL_S = 0.5
"""How soon the loop notices that the server ends."""

Update = tuple[str, int | None]
"""Path and step of new weights."""


class QueueFull(Exception):
    """As many requests wait as may."""


class JobFailed(RuntimeError):
    """The model did not do a job, by no fault of the request."""


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


class RequestQueue:
    """Requests that wait.

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
            QueueFull: too many do already.
        """
        with self._changed:
            if len(self._jobs) >= self._max_jobs:
                raise QueueFull(f"{self._max_jobs} requests wait already")
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


class ModelLoop:
    """One rank's loop.

    Args:
        scorer: the model.
        queue: of rank 0.
    """

    def __init__(self, scorer: Scorer, queue: RequestQueue) -> None:
        self._scorer, self._queue = scorer, queue
        self.num_running = self.num_scored = 0

    def lead(self, is_open: Callable[[], bool]) -> None:
        """Rank 0: work until the server is closed."""
        silent_s = 0.0
        try:
            while is_open():
                jobs = self._queue.take(POLL_S)
                silent_s = 0.0 if jobs else silent_s + POLL_S
                if jobs:
                    self._do(jobs)
                elif silent_s >= HEARTBEAT_S:
                    _tell(None)
                    silent_s = 0.0
        finally:
            self._queue.fail_all(lambda: JobFailed("the server ends"))
        _tell("stop")

    def follow(self) -> None:
        """The other ranks: do what rank 0 says until it says stop."""
        while (work := _hear()) != "stop":
            if work is not None:
                with contextlib.suppress(UsageError):  # rank 0 has the same, and answers it
                    self._run(work)

    def _do(self, jobs: Sequence[Job]) -> None:
        """Do jobs that were taken together; what goes wrong is theirs, and with several ranks also the loop's."""
        self.num_running = len(jobs)
        work = jobs[0].work if jobs[0].alone else [job.work for job in jobs]
        try:
            _tell(work)
            results = self._run(work)
        except Exception as error:
            if not isinstance(error, UsageError):
                logger.exception("%d requests failed", len(jobs))
            failure = error if isinstance(error, UsageError) else JobFailed(f"the model failed: {error}")
            for job in jobs:
                job.result.set_exception(failure)
            if dist.get_world_size() > 1 and not isinstance(error, UsageError):
                raise  # the ranks may not be at the same place any more
        else:
            for job, result in zip(jobs, results, strict=True):
                job.result.set_result(result)
            self.num_scored += len(jobs)
        finally:
            self.num_running = 0

    def _run(self, work: list[ScoreRequest] | Update) -> Sequence[Any]:
        if isinstance(work, list):
            return self._scorer.score(work)
        self._scorer.update_weights(*work)
        return [None]


def _tell(work: Any) -> None:
    if dist.get_world_size() > 1:
        dist.broadcast_object_list([work], src=0, group=get_gloo_group())


def _hear() -> Any:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=0, group=get_gloo_group())
    return heard[0]
