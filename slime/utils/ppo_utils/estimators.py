"""What `--advantage-estimator` means: one row per algorithm; adding one is a function, a row and a test.

The rows hold functions and facts about them, no state and no `args`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slime.utils.ppo_utils.policy_loss import compute_policy_loss
from slime.utils.ppo_utils.returns import get_grpo_returns


@dataclass(frozen=True)
class Estimator:
    """One algorithm."""

    returns_fn: Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]
    """(rewards [S], kl per sample [R]) -> return of each token, per sample [R]; also its advantage."""
    policy_loss_fn: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c) -> (loss, clip indicator) of each token."""
    centers_rewards_by_group: bool
    """Rewards have their group's mean subtracted, unless --disable-rewards-normalization."""
    allows_std_norm: bool
    """... and are divided by its standard deviation, unless --disable-grpo-std-normalization."""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(get_grpo_returns, compute_policy_loss, centers_rewards_by_group=True, allows_std_norm=True),
}
