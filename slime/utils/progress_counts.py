"""What this process has done so far: samples, answers, micro-batches, buckets, ...

A watchdog asks only whether a count has moved since it last looked. It knows nothing about who looks.
"""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def went_on(what: str, amount: int = 1) -> None:
    """Count something that was done ("samples"). Cheap; two threads may lose a count to each other, never all."""
    _counts[what] += amount


def counts() -> dict[str, int]:
    """Everything that was counted in this process."""
    return dict(_counts)
