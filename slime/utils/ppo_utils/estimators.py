"""What `--advantage-estimator` means: one row per algorithm; adding one is a function, a row and a test.

An advantage is made in three places, and a row says what happens in each: the group's baseline is subtracted from the
rewards where the group is known (slime.rollout.rewards), rewards become values of tokens on the trainer, and the loss
weighs them with a ratio of probabilities. The rows hold functions and facts about them, no state and no `args`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slime.utils.ppo_utils.policy_loss import compute_cispo_loss, compute_policy_loss
from slime.utils.ppo_utils.returns import (
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)
from slime.utils.reward_baselines import Baseline, group_mean, leave_one_out, length_weighted

Tensors = Sequence[torch.Tensor]
ReturnsFn = Callable[[torch.Tensor, Tensors, Tensors, float, float], list[torch.Tensor]]
LossFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _broadcast(
    rewards: torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float, gamma: float
) -> list[torch.Tensor]:
    return get_grpo_returns(rewards, kl)


def _baseline_minus_kl(
    rewards: torch.Tensor, kl: Tensors, loss_masks: Tensors, kl_coef: float, gamma: float
) -> list[torch.Tensor]:
    return get_reinforce_plus_plus_baseline_advantages(rewards, kl, loss_masks, kl_coef)


def _clipped(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)


def _cispo(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_cispo_loss(ppo_kl, log_probs, advantages, eps_clip, eps_clip_high)


@dataclass(frozen=True)
class Estimator:
    """One algorithm."""

    returns_fn: ReturnsFn | None = _broadcast
    """(rewards [S], kl [S][R], loss masks [S][R], kl_coef, gamma) -> return of each token [S][R]; also its advantage,
    before whitening. None: GAE makes both from the values of a critic (slime.utils.ppo_utils.gae)."""
    policy_loss_fn: LossFn = _clipped
    """(ppo_kl, log_probs, advantages, eps_clip, eps_clip_high, eps_clip_c) -> (loss, clip indicator) per token."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether new / old probability is each token's own, or the geometric mean of its sample's trained tokens."""
    baseline_fn: Baseline | None = None
    """What is subtracted from the rewards of a group, unless --disable-rewards-normalization."""
    subtracts_greedy_reward: bool = False
    """... the reward of the prompt's greedy response instead (metadata["greedy_reward"])."""
    allows_std_norm: bool = False
    """... and the rest is divided by the group's deviation, unless --disable-grpo-std-normalization."""
    takes_kl_into_rewards: bool = False
    """--kl-coef has an effect."""

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.returns_fn is None


_GRPO = Estimator(baseline_fn=group_mean, allows_std_norm=True)

ESTIMATORS: dict[str, Estimator] = {
    # DeepSeekMath, arXiv 2402.03300: A = (r - mean) / std of the group; Dr.GRPO (arXiv 2503.20783) leaves out std
    "grpo": _GRPO,
    # arXiv 2507.18071: as GRPO, with the ratio of whole sequences, exp(mean_t(new - old))
    "gspo": Estimator(baseline_fn=group_mean, allows_std_norm=True, ratio="sequence"),
    # MiniMax-M1, arXiv 2506.13585: as GRPO, with the loss -sg(clip(ratio)) A log p, which clips no token out
    "cispo": Estimator(baseline_fn=group_mean, allows_std_norm=True, policy_loss_fn=_cispo),
    # arXiv 2501.03262: discounted returns of reward and KL, whitened over the batch; no groups
    "reinforce_plus_plus": Estimator(returns_fn=get_reinforce_plus_plus_returns, takes_kl_into_rewards=True),
    # ... and its variant for groups: A = r - mean of the group - kl_coef KL, whitened over the batch
    "reinforce_plus_plus_baseline": Estimator(
        returns_fn=_baseline_minus_kl, baseline_fn=group_mean, takes_kl_into_rewards=True
    ),
    # arXiv 1707.06347: A and returns by GAE from a critic's values, with -kl_coef KL of each token as its reward and r
    # on the last; no groups
    "ppo": Estimator(returns_fn=None, takes_kl_into_rewards=True),
    # arXiv 2402.14740: A = r - mean of the group's other rewards
    "rloo": Estimator(baseline_fn=leave_one_out),
    # arXiv 2310.10505: A = r - reward of the greedy response
    "remax": Estimator(subtracts_greedy_reward=True),
    # arXiv 2505.23585: A = r - length-weighted mean of the group
    "opo": Estimator(baseline_fn=length_weighted),
}
