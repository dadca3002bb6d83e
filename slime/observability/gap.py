"""The gap between trainer and engine, watched for jumps: `|train-engine|` of the console.

It grows with the age of the weights that generated, and stays in one order of magnitude. A jump says that engines
hold other weights than the trainer thinks, or that the policy runs away from what its tokens were sampled with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

GAP = "train/train_rollout_logprob_abs_diff"
FACTOR = 100.0
LEAST_EARLIER = 3  # the first rollout of an asynchronous run is of fresh weights, the next ones are not
LEAST_MEDIAN = 2.0**-23  # the resolution of float32: below it, gaps are rounding
REMEMBERED = 101


def jump(value: float, earlier: Sequence[float]) -> float | None:
    """Return how many times the median of `earlier` a value is, where that is a jump; else None."""
    known = [gap for gap in earlier if math.isfinite(gap)]
    if len(known) < LEAST_EARLIER or not math.isfinite(value):
        return None
    ratio = value / max(median(known), LEAST_MEDIAN)
    return ratio if ratio >= FACTOR else None


class GapWatch:
    """The gaps of the last train steps."""

    def __init__(self) -> None:
        self._earlier: deque[float] = deque(maxlen=REMEMBERED)

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what the line of a step says of its gap: nothing where it has none, or an ordinary one."""
        if GAP not in metrics:
            return []
        ratio = jump(metrics[GAP], self._earlier)
        self._earlier.append(metrics[GAP])
        return [] if ratio is None else [f"(!) |train-engine| is {ratio:.2g}x its median: see docs/debugging.md"]
