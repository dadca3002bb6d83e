"""KL(new || base): per-token estimators from log-probabilities of sampled tokens, and a controller of its weight.

Pure arithmetic (http://joschu.net/blog/kl-approx.html); it does not mask or average.
"""

from __future__ import annotations

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
