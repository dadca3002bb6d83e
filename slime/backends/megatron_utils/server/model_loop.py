"""The loop around the model: rank 0 takes jobs from the line and tells the other ranks, all ranks do them together.

Rank 0 speaks at least every `HEARTBEAT_S` seconds, so that a rank that waits for it can tell an idle server from a
dead one (the collective's own time limit). It knows nothing about HTTP.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from slime.backends.megatron_utils.server.protocol import ScoreRequest
from slime.backends.megatron_utils.server.scoring import Scorer
from slime.backends.megatron_utils.server.waiting_line import Job, WaitingLine
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
POLL_S = 0.5
"""How soon the loop notices that the server ends."""

Update = tuple[str, int | None]
"""Path and step of new weights."""


class ModelLoop:
    """One rank's loop.

    Args:
        scorer: the model.
        line: of rank 0.
    """

    def __init__(self, scorer: Scorer, line: WaitingLine) -> None:
        self._scorer, self._line = scorer, line
        self.num_running = self.num_scored = 0

    def lead(self, is_open: Callable[[], bool]) -> None:
        """Rank 0: work until the server is closed."""
        silent_s = 0.0
        try:
            while is_open():
                jobs = self._line.take(POLL_S)
                silent_s = 0.0 if jobs else silent_s + POLL_S
                if jobs:
                    self._do(jobs)
                elif silent_s >= HEARTBEAT_S:
                    _tell(None)
                    silent_s = 0.0
        finally:
            self._line.fail_all(lambda: RuntimeError("the server ends"))
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
            for job in jobs:
                job.result.set_exception(error)
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
