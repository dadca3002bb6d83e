"""The clipped policy-gradient loss of PPO, per token.

Departures from the paper: (1) the clip range may be asymmetric (`eps_clip_high`, DAPO); (2) with `eps_clip_c` the loss
of tokens with a negative advantage is bounded from above too (dual clip). It does not mask, average or know where the
advantages come from.
"""

from __future__ import annotations

import torch


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator of each token.

    Args:
        ppo_kl: old minus new log-probability of the sampled token; the ratio is exp(-ppo_kl).
        advantages: advantage of each token, same shape.
        eps_clip: the ratio is not followed below 1 - eps_clip (for negative advantages),
        eps_clip_high: nor above 1 + eps_clip_high (for positive ones).
        eps_clip_c: dual clip: a token with negative advantage A costs at most -eps_clip_c * A; None = no bound.

    Returns:
        pg_losses and clipfrac (1.0 where the ratio's clip decides the loss), same shape.

    Raises:
        ValueError: `eps_clip_c` is not above 1.
    """
    ratio = torch.exp(-ppo_kl)
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
