"""Baselines that are subtracted from the rewards of a group; an estimator's row gives one's name (`BASELINES`).

Plain floats, without torch; equal rewards minus their baseline are exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Baseline = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(rewards [n], trained tokens [n]) of a group -> the baseline of each [n]."""

GREEDY_REWARD = "greedy_reward"
"""Key of Sample.metadata: the reward of the prompt's greedy response, ReMax's baseline."""


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """mean(r), the same for all (GRPO, arXiv 2402.03300).

    Example:
        >>> group_mean([1.0, 0.0, 2.0], [5, 5, 5])
        [1.0, 1.0, 1.0]
    """
    return [_mean(rewards)] * len(rewards)


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """The mean of the others, which does not depend on the response itself (RLOO, arXiv 2402.14740).

    A response that is alone is its own baseline: there is nothing to compare it with, so its advantage is 0.

    Example:
        >>> leave_one_out([1.0, 0.0, 2.0], [5, 5, 5])
        [1.0, 1.5, 0.5]
    """
    count = len(rewards)
    if count < 2:
        return list(rewards)
    return [_mean([*rewards[:i], *rewards[i + 1 :]]) for i in range(count)]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """sum(l r) / sum(l): the baseline of least variance where a response's gradient grows with its length l (OPO,
    arXiv 2505.23585). The plain mean where nothing is trained.

    Example:
        >>> length_weighted([1.0, 0.0], [3, 1])
        [0.75, 0.75]
    """
    total = sum(lengths)
    if total == 0 or max(rewards) == min(rewards):
        return group_mean(rewards, lengths)
    weighted = math.fsum(reward * length for reward, length in zip(rewards, lengths, strict=True))
    return [weighted / total] * len(rewards)


def _mean(values: Sequence[float]) -> float:
    # the mean of equal numbers is that number also where a sum and a division would round
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


BASELINES: dict[str, Baseline] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
}
"""Name -> function. "greedy" is not here: it is the reward of another response, in Sample.metadata."""
