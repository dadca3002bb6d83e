"""Losses per token, by the name that an estimator's row gives (`LOSSES`): PPO's clipped one, CISPO's; the log-ratio of
sequences that GSPO puts in place of a token's; the critic's loss; and the KL from another policy.

Where they depart from PPO as published (slime.algorithms.policy has more):

1. the clip range may be asymmetric (`eps_clip_high`, DAPO);
2. with `eps_clip_c` the loss of tokens with a negative advantage is bounded from above too (dual clip);
3. the critic's squared error has no factor of 1/2.

KL(new || base) has per-token estimators from log-probabilities of sampled tokens
(http://joschu.net/blog/kl-approx.html), and a controller of its weight. Nothing here masks or averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

KL_CLAMP = 10.0
MAX_LOG_RATIO = 20.0
KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl", "abs", "mse")
MAX_RELATIVE_ERROR = 0.2


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to [-20, 20], as verl does, before a ratio of probabilities is made of it.

    exp overflows at 89 nats, and a token whose ratio is inf has the gradient 0 * inf = nan wherever a clip or a mask
    leaves it out of the loss. Beyond the bounds the gradient is 0.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str = "k1",
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL of each token, shape of the inputs; with lr = log_probs - log_probs_base:

    k1 = lr (unbiased, may be negative); k2 = mse = lr^2 / 2; k3 = exp(-lr) - 1 + lr (unbiased, never negative) with lr
    clamped to [-20, 20]; low_var_kl = k3 clamped to [-10, 10]; abs = `|lr|`.

    Args:
        log_probs: of the policy.
        log_probs_base: of the reference.
        kl_loss_type: one of KL_LOSS_TYPES.
        importance_ratio: the policy's probability over that of the one that sampled; multiplies the KL, which then is
            unbiased for tokens of an older policy, and so is its gradient (DeepSeek-V3.2, arXiv 2512.02556). The clamp
            of low_var_kl comes after it.

    Raises:
        ValueError: unknown `kl_loss_type`.
    """
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = log_ratio
    elif kl_loss_type in ("k2", "mse"):
        kl = log_ratio.square() / 2
    elif kl_loss_type == "abs":
        kl = log_ratio.abs()
    elif kl_loss_type in ("k3", "low_var_kl"):
        log_ratio = clamp_log_ratio(log_ratio)
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        known = ", ".join(KL_LOSS_TYPES)
        raise ValueError(f"unknown KL estimator {kl_loss_type!r}; --kl-loss-type takes one of {known}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-KL_CLAMP, KL_CLAMP) if kl_loss_type == "low_var_kl" else kl


@dataclass
class KlController:
    """The weight of the KL in the rewards: fixed, or steered to a target (Ziegler et al., arXiv 1909.08593).

    Adaptive: `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon`. Its state is `coef`.
    """

    coef: float
    target: float | None = None
    """None = fixed."""
    horizon: float = 1.0
    """Samples over which an error of 1 would double the weight; the clip lets it grow by a fifth."""

    def update(self, kl: float, num_samples: int) -> None:
        """Take in the KL of a rollout of so many samples: the mean over samples of each one's mean over its tokens."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * num_samples / self.horizon


@dataclass(frozen=True)
class Clip:
    """How far the ratio of new to old probability is followed: see `compute_policy_loss`."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator of each token.

    Args:
        ppo_kl: old minus new log-probability of the sampled token; the ratio is exp(-ppo_kl), of at most 20 nats.
        advantages: advantage of each token, same shape.
        eps_clip: the ratio is not followed below 1 - eps_clip (for negative advantages),
        eps_clip_high: nor above 1 + eps_clip_high (for positive ones).
        eps_clip_c: dual clip: a token with negative advantage A costs at most -eps_clip_c * A; None = no bound.

    Returns:
        pg_losses and clipfrac (1.0 where the ratio's clip decides the loss), same shape.

    Raises:
        ValueError: `eps_clip_c` is not above 1.
    """
    ratio = torch.exp(clamp_log_ratio(-ppo_kl))
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    pg_losses = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c must be above 1, found {eps_clip_c}")
        bounded = torch.minimum(pg_losses, -eps_clip_c * advantages)
        pg_losses = torch.where(advantages < 0, bounded, pg_losses)
    return pg_losses, clipfrac


def compute_cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) * A * log p: a clipped token still has a gradient, that of its
    log-probability with a bounded weight (MiniMax-M1, arXiv 2506.13585).

    Args:
        ppo_kl: old minus new log-probability of each token.
        log_probs: the new log-probability, through which the gradient goes.
        advantages: same shape.
        eps_clip: 1 or more leaves the ratio unbounded from below, as in the paper.
        eps_clip_high: bound from above.

    Returns:
        pg_losses and clipfrac (1.0 where the clip changed the ratio), same shape.
    """
    ratio = torch.exp(clamp_log_ratio(-ppo_kl.detach()))
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Clip], tuple[torch.Tensor, torch.Tensor]]] = {
    "clipped": lambda ppo_kl, log_probs, advantages, clip: compute_policy_loss(
        ppo_kl, advantages, clip.low, clip.high, clip.dual
    ),
    "cispo": lambda ppo_kl, log_probs, advantages, clip: compute_cispo_loss(
        ppo_kl, log_probs, advantages, clip.low, clip.high
    ),
}
"""Name -> fn(old minus new log-prob, new log-prob, advantage, clip) -> (loss, clip indicator), per token."""


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Old minus new log-probability, averaged over each sample's trained tokens and given to all of its tokens, so
    that the ratio is that of sequences, by their length (GSPO, arXiv 2507.18071).

    Args:
        full_log_probs: per sample [R], new.
        full_old_log_probs: per sample [R].
        local_log_probs: per sample, this rank's part of the response (all of it without context parallelism).
        loss_masks: per sample [R]; a fully masked sample has 0.

    Returns:
        [sum of the local parts].
    """
    parts = []
    for new, old, local, mask in zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True):
        parts.append(masked_mean(old - new, mask).expand_as(local))
    return torch.cat(parts)


def compute_opsm_mask(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    opsm_delta: float,
) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): 0 for the tokens with a negative advantage of a
    sample that the policy has moved away from, where mean_t(old - new) over its trained tokens > `opsm_delta`; else 1.

    Args:
        full_log_probs: per sample [R], new.
        full_old_log_probs: per sample [R].
        advantages: per sample [R].
        loss_masks: per sample [R].
        opsm_delta: in nats per token.

    Returns:
        [sum of R], without gradient.
    """
    keep = []
    for new, old, advantage, mask in zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True):
        is_far = masked_mean(old - new, mask) > opsm_delta
        keep.append(1 - (is_far & (advantage < 0)).float())
    return torch.cat(keep)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values whose mask is not 0 (scalar; 0 where there is none). A masked value may be inf or nan."""
    return torch.where(mask.bool(), values, 0).sum() / mask.bool().sum().clamp(min=1)


def clipped_value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (V' - R)^2) with V' = V clipped to `before` +- value_clip, and 1.0 where V' decides.

    A value that moves further from the one before the update is not followed there, as in arXiv 1707.06347's code. All
    are of one shape.
    """
    clipped = before + (values - before).clamp(-value_clip, value_clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(error, clipped_error), (clipped_error > error).float()
