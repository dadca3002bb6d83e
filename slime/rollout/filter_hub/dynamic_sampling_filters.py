"""Shipped dynamic filters: drop groups whose rewards are all equal, or whose advantages are out of a range."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.config.args import Args
from slime.rollout.filter_hub import DynamicFilterOutput
from slime.rollout.train_data import post_process_rewards
from slime.utils.types import Sample

_MIN_STD = 1e-6


def check_reward_nonzero_std(args: Args, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ (unbiased standard deviation above 1e-6)."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1)) > _MIN_STD
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_advantage_range(args: Args, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose largest advantage by amount, after the baseline, is from --advantage-range-min to -max."""
    largest = max(map(abs, post_process_rewards(args, samples)[1]))
    if largest < args.advantage_range_min:
        return DynamicFilterOutput(keep=False, reason="advantage_below_range")
    is_above = args.advantage_range_max is not None and largest > args.advantage_range_max
    return DynamicFilterOutput(keep=not is_above, reason="advantage_above_range" if is_above else None)


def check_reward_nonzero_std_with_fallback(args: Args, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a batch is never left incomplete: groups are kept when too few remain."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
