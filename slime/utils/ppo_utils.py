"""Public path of the arithmetic of policy optimisation, which is in slime.algorithms, by upstream's signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slime.algorithms import advantages, log_probs, losses
from slime.algorithms.advantages import (
    Tensors,
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_token_rewards,
    vanilla_gae,
    whiten,
)
from slime.algorithms.losses import (
    KlController,
    clamp_log_ratio,
    compute_approx_kl,
    compute_cispo_loss,
    compute_gspo_kl,
    compute_policy_loss,
)

if TYPE_CHECKING:
    from slime.config.args import Args

__all__ = [
    "KlController",
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "clamp_log_ratio",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "get_token_rewards",
    "vanilla_gae",
    "whiten",
]


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: torch.distributed.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`slime.algorithms.log_probs.calculate_log_probs_and_entropy` with log_probs [n, 1]; the entropy is [n]."""
    of_targets, entropy = log_probs.calculate_log_probs_and_entropy(
        logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad
    )
    return of_targets[:, None], entropy


def compute_opsm_mask(
    args: Args,
    full_log_probs: Tensors,
    full_old_log_probs: Tensors,
    advantages: Tensors,
    loss_masks: Tensors,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`slime.algorithms.losses.compute_opsm_mask` with the threshold of --opsm-delta.

    Returns:
        the mask [sum of R], and the share of the trained tokens that it leaves out.
    """
    keep = losses.compute_opsm_mask(full_log_probs, full_old_log_probs, advantages, loss_masks, args.opsm_delta)
    return keep, losses.masked_mean(1 - keep, torch.cat([*loss_masks]))


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: Tensors,
    loss_masks: Tensors,
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """`slime.algorithms.advantages.get_reinforce_plus_plus_returns`; the lengths, which columns have, are not read."""
    return advantages.get_reinforce_plus_plus_returns(rewards, kl, loss_masks, kl_coef, gamma)
