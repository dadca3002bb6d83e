"""Rewards for a run that learns from its teacher alone: they are logged and not trained on.

--custom-reward-post-process-path examples.on_policy_distillation.reward:only_logged
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


def only_logged(args: Namespace, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(rewards as scored, for `rollout/raw_reward`; zeros, for training)."""
    return [sample.get_reward_value(args) for sample in samples], [0.0] * len(samples)
