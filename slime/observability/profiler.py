"""Traces of a trainer rank: parts of a rollout's training under torch's profiler, one file per rollout and part.

The files are for chrome://tracing or ui.perfetto.dev: `<directory>/rollout_<id>_<target>_rank_<rank>.json.gz`. A
process has one torch profiler, so parts must not contain each other. It knows the parts only by their names.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.utils import accelerator

logger = logging.getLogger(__name__)


class Profiler:
    """Records chosen parts of chosen rollouts; anything else costs nothing.

    Args:
        directory: of the traces; made when the first is written.
        rank: of this process, for the files' names.
        targets: names of the parts to record.
        rollouts: ids of the rollouts to record.
    """

    def __init__(self, directory: str | Path, *, rank: int, targets: Collection[str], rollouts: range) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._targets = frozenset(targets)
        self._rollouts = rollouts

    @contextmanager
    def record(self, target: str, rollout_id: int) -> Iterator[None]:
        """Record a block, if it is chosen; a block that raises leaves no trace."""
        if target not in self._targets or rollout_id not in self._rollouts:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if accelerator.kind() == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as trace:
            yield
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rollout_{rollout_id}_{target}_rank_{self._rank}.json.gz"
        trace.export_chrome_trace(str(path))
        logger.info("profile: %s", path)


def nothing_recorded(asked: range, done: range) -> str | None:
    """A sentence when none of the rollouts to record is among those that a run does or did."""
    if set(asked) & set(done):
        return None
    ran = f"trains on rollouts from {done[0]} to {done[-1]}" if done else "trains on no rollout"
    return (
        f"nothing is profiled: --profile-step-start {asked.start} --profile-step-end {asked.stop} name rollouts "
        f"{asked.start} to {asked.stop - 1}, and this run {ran}; change them."
    )
