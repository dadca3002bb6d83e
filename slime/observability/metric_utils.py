"""Small reducers from lists of numbers or a text to metrics, and the step at which they are logged. Pure functions."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence

REPETITION_MIN_CHARS = 10_000
REPETITION_RATIO = 10.0


def dict_add_prefix(d: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Put `prefix` before every name.

    Example:
        >>> dict_add_prefix({"mean": 1.0}, "response_len/")
        {'response_len/mean': 1.0}
    """
    return {f"{prefix}{name}": value for name, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min; empty in, empty out.

    Example:
        >>> compute_statistics([1, 2, 6])
        {'mean': 3.0, 'median': 2.0, 'max': 6.0, 'min': 1.0}
    """
    if not values:
        return {}
    return {
        "mean": float(statistics.fmean(values)),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def compute_spread(values: Sequence[float]) -> dict[str, float]:
    """`compute_statistics` with the 10th and the 90th percentile, linear between values; empty in, empty out.

    Example:
        >>> compute_spread(range(11))
        {'mean': 5.0, 'median': 5.0, 'max': 10.0, 'min': 0.0, 'p10': 1.0, 'p90': 9.0}
    """
    if not values:
        return {}
    tenths = statistics.quantiles([*values, *values] if len(values) == 1 else values, n=10, method="inclusive")
    return {**compute_statistics(values), "p10": float(tenths[0]), "p90": float(tenths[-1])}


def estimate_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of `k` samples drawn without replacement is correct: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, *, num_groups: int | None = None
) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... <= group_size, averaged over groups; a success is a reward of exactly 1.

    Args:
        flat_rewards: `[num_groups * group_size]`, the samples of a group side by side.
        group_size: samples per prompt; with 1 there is nothing to estimate and the result is empty.
        num_groups: checked against the length when given.

    Raises:
        ValueError: the length is not `num_groups * group_size`.
    """
    groups = len(flat_rewards) // group_size
    if groups * group_size != len(flat_rewards) or num_groups not in (None, groups):
        expected = f"{num_groups} x {group_size}" if num_groups is not None else f"a multiple of {group_size}"
        raise ValueError(f"pass rate needs {expected} rewards, got {len(flat_rewards)}")
    if group_size <= 1 or not groups:
        return {}
    correct = [
        sum(1 for reward in flat_rewards[start : start + group_size] if reward == 1)
        for start in range(0, len(flat_rewards), group_size)
    ]
    powers = [2**exponent for exponent in range(int(math.log2(group_size)) + 1)]
    return {f"pass@{k}": statistics.fmean(estimate_pass_at_k(group_size, c, k) for c in correct) for k in powers}


def compute_rollout_step(args: object, rollout_id: int) -> int:
    """The step of a rollout's metrics: its id. With --wandb-always-use-train-step the W&B sink adds the train step.

    Args:
        args: unused; part of the public signature.
        rollout_id: which.
    """
    return rollout_id


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text shrink more than tenfold under zlib."""
    if len(text) <= REPETITION_MIN_CHARS:
        return False
    tail = text[-REPETITION_MIN_CHARS:].encode()
    return len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO
