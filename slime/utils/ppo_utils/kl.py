"""Per-token estimators of KL(new || base) from log-probabilities of sampled tokens.

Pure tensor arithmetic (http://joschu.net/blog/kl-approx.html); it does not mask or average.
"""

from __future__ import annotations

import torch

KL_CLAMP = 10.0
KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(log_probs: torch.Tensor, log_probs_base: torch.Tensor, kl_loss_type: str = "k1") -> torch.Tensor:
    """KL of each token, shape of the inputs; with lr = log_probs - log_probs_base:

    k1 = lr (unbiased, may be negative); k2 = lr^2 / 2; k3 = exp(-lr) - 1 + lr (unbiased, never negative);
    low_var_kl = k3 clamped to [-10, 10].

    Raises:
        ValueError: unknown `kl_loss_type`.
    """
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        return log_ratio
    if kl_loss_type == "k2":
        return log_ratio.square() / 2
    if kl_loss_type in ("k3", "low_var_kl"):
        kl = torch.expm1(-log_ratio) + log_ratio
        return kl.clamp(-KL_CLAMP, KL_CLAMP) if kl_loss_type == "low_var_kl" else kl
    raise ValueError(f"unknown KL estimator {kl_loss_type!r}; --kl-loss-type takes one of {', '.join(KL_LOSS_TYPES)}")
