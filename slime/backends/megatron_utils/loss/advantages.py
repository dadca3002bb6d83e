"""Advantages of one rank's share of a rollout, from its rewards and log-probabilities, before training on it.

It adds the columns `kl`, `advantages` and `returns`. It does not normalise rewards (slime.rollout.rewards) and
computes no log-probs.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.utils.misc import load_function
from slime.utils.ppo_utils import ESTIMATORS, compute_approx_kl


def compute_advantages_and_returns(args: Any, rollout_data: dict[str, Any]) -> None:
    """Fill `kl`, `advantages` and `returns` of a RolloutBatch in place, each [S][R] float32.

    Args:
        args: `advantage_estimator`, `custom_advantage_function_path`, `kl_loss_type`.
        rollout_data: with `rewards`, `loss_masks`, `log_probs` and `ref_log_probs` where they exist; `kl` is zero
            where one of them does not.

    Raises:
        ValueError: the custom function left a column out.
    """
    masks = rollout_data["loss_masks"]
    log_probs, ref_log_probs = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
    lengths = [len(mask) for mask in masks]
    if log_probs is not None and ref_log_probs is not None:
        kl = compute_approx_kl(torch.cat(log_probs), torch.cat(ref_log_probs), args.kl_loss_type)
    else:
        kl = torch.zeros(sum(lengths), device=masks[0].device)
    rollout_data["kl"] = list(kl.split(lengths))

    if args.custom_advantage_function_path:
        load_function(args.custom_advantage_function_path)(args, rollout_data)
        for name in ("advantages", "returns"):
            if name not in rollout_data:
                raise ValueError(
                    f"--custom-advantage-function-path {args.custom_advantage_function_path} did not set "
                    f"rollout_data[{name!r}]"
                )
        return
    rewards = torch.tensor(rollout_data["rewards"], dtype=torch.float32, device=masks[0].device)
    returns = ESTIMATORS[args.advantage_estimator].returns_fn(rewards, rollout_data["kl"])
    rollout_data["returns"] = returns
    rollout_data["advantages"] = list(returns)
