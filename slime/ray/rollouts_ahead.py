"""The rollouts that a driver has begun and not yet trained: a queue, in the order of their numbers.

It knows the verbs of a run, not what a rollout is.
"""

from __future__ import annotations

from collections import deque

from slime.ray.run import PendingRollout, TrainingRun


class RolloutsAhead:
    """At most `limit` rollouts ahead of the one that is trained.

    Args:
        run: generates them.
        limit: rollouts that may be begun or done while another is trained (--async-buffer-size).
    """

    def __init__(self, run: TrainingRun, limit: int) -> None:
        self._run, self._limit = run, limit
        self._begun: deque[PendingRollout] = deque()

    def take(self, rollout_id: int) -> PendingRollout:
        """This rollout, once its samples are there; then those behind it are begun, as many as may be."""
        if not self._begun:
            self._begun.append(self._run.start_generate(rollout_id))
        rollout = self._run.wait_generated(self._begun.popleft())
        self._fill(rollout_id)
        return rollout

    def drain(self) -> None:
        """Wait until all of them are generated. The manager does them in order, so the last one stands for all."""
        self._run.drain(self._begun[-1] if self._begun else None)

    def _fill(self, trained: int) -> None:
        while len(self._begun) < self._limit:
            following = trained + len(self._begun) + 1
            if self._run.is_last(following - 1) or not self._run.may_start(following):
                return
            self._begun.append(self._run.start_generate(following))
