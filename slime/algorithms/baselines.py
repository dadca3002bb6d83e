"""Baselines that are subtracted from the rewards of a group, by the name in an estimator's row (`BASELINES`), and
DAPO's penalty for overlong responses, which is added to rewards before.

Plain floats, without torch; equal rewards minus their baseline are exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime.utils.misc import needed
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args

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


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float) -> float:
    """Return what is added to the reward of a response near the length limit, which is never positive.

    DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), with L = `length`, M = `max_length`, C = `buffer_length`::

        0                     for L <= M - C
        ((M - C) - L) / C     for M - C < L <= M      (falls from 0 to -1)
        -1                    for L > M

    times `factor` (1 in the paper).

    Args:
        length: response tokens.
        max_length: --rollout-max-response-len.
        buffer_length: --overlong-buffer-len.
        factor: --overlong-penalty-factor.

    Example:
        >>> overlong_penalty(15, max_length=20, buffer_length=10, factor=1.0)
        -0.5
    """
    excess = min(max(length - (max_length - buffer_length), 0), buffer_length)
    return -factor * excess / buffer_length if excess else 0.0


def overlong_penalties(args: Args, samples: Sequence[Sample]) -> list[float]:
    """Return what is added to each reward (`overlong_penalty`); zeros without --overlong-buffer-len."""
    if args.overlong_buffer_len is None:
        return [0.0] * len(samples)
    return [
        overlong_penalty(
            sample.response_length,
            max_length=needed(args.rollout_max_response_len),
            buffer_length=args.overlong_buffer_len,
            factor=args.overlong_penalty_factor,
        )
        for sample in samples
    ]


def overlong_metrics(penalties: Sequence[float]) -> dict[str, float]:
    """Mean penalty, and share of the responses that got one."""
    count = max(len(penalties), 1)
    return {"overlong_penalty": sum(penalties) / count, "overlong_ratio": sum(p != 0 for p in penalties) / count}
