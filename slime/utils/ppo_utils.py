"""Public path of the arithmetic of policy optimisation, which is in slime.algorithms."""

from slime.algorithms.kl import KlController, clamp_log_ratio, compute_approx_kl
from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.algorithms.losses import compute_cispo_loss, compute_gspo_kl, compute_opsm_mask, compute_policy_loss
from slime.algorithms.returns import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    get_token_rewards,
    vanilla_gae,
    whiten,
)

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
