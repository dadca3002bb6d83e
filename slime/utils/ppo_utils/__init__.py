"""The arithmetic of policy optimisation on tensors: log-probabilities, KL, losses, returns, table of algorithms.

Nothing here knows about `args`, models, ranks beyond the tensor-parallel group it is handed, or logging.
"""

from slime.utils.ppo_utils.estimators import ESTIMATORS, Estimator
from slime.utils.ppo_utils.gae import (
    chunked_gae,
    get_advantages_and_returns_batch,
    get_token_rewards,
    vanilla_gae,
)
from slime.utils.ppo_utils.kl import KlController, clamp_log_ratio, compute_approx_kl
from slime.utils.ppo_utils.log_probs import calculate_log_probs_and_entropy
from slime.utils.ppo_utils.policy_loss import (
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
)
from slime.utils.ppo_utils.returns import (
    chunked_discounted_returns,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)
from slime.utils.ppo_utils.whitening import whiten

__all__ = [
    "ESTIMATORS",
    "Estimator",
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
