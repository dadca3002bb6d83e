"""Notices a train step whose loss is out of all proportion to those before it: --check-for-spiky-loss.

It only says so, in the log and as `train/spiky_loss`; the run goes on. It knows what this process has seen.
"""

from __future__ import annotations

import logging
import math
from collections import deque

logger = logging.getLogger(__name__)

FACTOR = 10.0
"""As Megatron's."""
FEWEST = 10
"""Losses that have to be known before one is judged."""
NOISE = 0.01
"""A policy loss of equal policies is 0 but for rounding: nothing below `FACTOR` times this is a spike."""


class SpikyLoss:
    """Compares each loss with the largest of the last hundred."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=100)

    def metrics(self, loss: float, *, step: str) -> dict[str, float]:
        """`spiky_loss`: 1 where this loss is a spike, else 0.

        Args:
            loss: of a train step.
            step: what the step is called in the log.
        """
        bound = FACTOR * max(NOISE, *self._before) if len(self._before) >= FEWEST else math.inf
        is_spike = not abs(loss) <= bound
        if is_spike:
            logger.error("the loss of %s is %g, more than %g times that of any step before it", step, loss, FACTOR)
        elif math.isfinite(loss):
            self._before.append(abs(loss))
        return {"spiky_loss": float(is_spike)}
