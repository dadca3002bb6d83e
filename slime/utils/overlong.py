"""DAPO's soft overlong punishment: the formula, and what it makes of samples. It changes no reward itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.utils.misc import needed
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float) -> float:
    """What is added to the reward of a response that comes close to the length limit.

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
    """What each reward loses for a response near --rollout-max-response-len; all 0 without --overlong-buffer-len."""
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
