"""Which number of a dict reward is trained on: one entry, or the weighted sum of several (--reward-key)."""

from __future__ import annotations

import functools
import math
from typing import Any


@functools.lru_cache
def reward_weights(key: str) -> dict[str, float]:
    """The weight of each part of a reward that --reward-key names: one name, or several with weights.

    Raises:
        ValueError: a weight is missing or no number, a part has two, or all are 0.

    Example:
        >>> reward_weights("correct=1,format=0.2")
        {'correct': 1.0, 'format': 0.2}
        >>> reward_weights("score")
        {'score': 1.0}
    """
    if "=" not in key:
        return {key: 1.0}
    pairs = [part.rpartition("=") for part in key.split(",")]
    try:
        weights = {name.strip(): float(weight) for name, _, weight in pairs}
    except ValueError:
        weights = {}
    if len(weights) < len(pairs) or "" in weights or not all(map(math.isfinite, weights.values())):
        raise ValueError("several parts are name=weight,name=weight, with a number for each name, and each name once")
    if not any(weights.values()):
        raise ValueError("the weights of all parts are 0")
    return weights


def part_of(reward: Any, key: str, option: str) -> Any:
    """The entry of a dict reward that a flag names, or the weighted sum of several.

    Raises:
        ValueError: the reward is no dict, or lacks one.
    """
    weights = reward_weights(key)
    missing = [name for name in weights if not isinstance(reward, dict) or name not in reward]
    if missing:
        of = f" as {missing[0]}" if len(weights) > 1 else ""
        raise ValueError(f"{option} {key}: the reward {reward!r} has no such key{of}")
    return reward[key] if key in weights else sum(weight * reward[name] for name, weight in weights.items())


def parts_of(number: float, key: str) -> dict[str, float]:
    """A reward with the parts that a flag names, whose number is `number`: the first part with a weight carries it.

    Example:
        >>> parts_of(1.0, "correct=2,format=1")
        {'correct': 0.5, 'format': 0.0}
    """
    weights = reward_weights(key)
    carrier = next(name for name, weight in weights.items() if weight)
    return {name: number / weights[carrier] if name == carrier else 0.0 for name in weights}
