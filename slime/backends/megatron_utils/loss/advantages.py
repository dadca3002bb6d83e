"""Advantages of one rank's share of a rollout, from its rewards and log-probabilities, before training on it.

It adds the columns `kl`, `advantages` and `returns`, and with a teacher `opd_reverse_kl`. It subtracts no baseline of
a group (slime.rollout.rewards) and computes no log-probs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.returns import RETURNS, get_advantages_and_returns_batch, get_token_rewards, whiten
from slime.backends.megatron_utils.loss.aggregation import zero_masked
from slime.backends.megatron_utils.loss.distillation import apply_opd_kl_to_advantages
from slime.config.args import Args
from slime.utils.misc import hook_args, load_function


def compute_advantages_and_returns(args: Args, rollout_data: dict[str, Any], kl_coef: float | None = None) -> None:
    """Fill `kl`, `advantages` and `returns` of a RolloutBatch in place, each [S][R] float32.

    Args:
        args: `advantage_estimator`, `custom_advantage_function_path`, `kl_loss_type`, `kl_coef`, `gamma`, `lambd`,
            `use_opd`, `opd_kl_coef`, `normalize_advantages`.
        rollout_data: with `rewards`, `loss_masks`, `values` for an estimator with a critic, `log_probs` and
            `ref_log_probs` where they exist; `kl` is zero where one of them does not.
        kl_coef: weight of the KL in the rewards, where a controller changes it; default: the flag's.

    Raises:
        ValueError: the custom function left a column out.
    """
    masks = rollout_data["loss_masks"]
    log_probs, ref_log_probs = rollout_data.get("log_probs"), rollout_data.get("ref_log_probs")
    lengths = [len(mask) for mask in masks]
    if log_probs is not None and ref_log_probs is not None:
        new, base = (zero_masked(rollout_data, torch.cat(column)) for column in (log_probs, ref_log_probs))
        kl = compute_approx_kl(new, base, args.kl_loss_type)
    else:
        kl = torch.zeros(sum(lengths), device=masks[0].device)
    rollout_data["kl"] = list(kl.split(lengths))

    if args.custom_advantage_function_path:
        _call_custom(args, rollout_data)
    else:
        rewards = torch.tensor(rollout_data["rewards"], dtype=torch.float32, device=masks[0].device)
        weight = args.kl_coef if kl_coef is None else kl_coef
        estimator = ESTIMATORS[args.advantage_estimator]
        if estimator.needs_critic:
            _estimate_with_values(args, rollout_data, rewards, weight)
        else:
            returns_fn = RETURNS[estimator.returns]
            rollout_data["returns"] = returns_fn(rewards, rollout_data["kl"], masks, weight, args.gamma)
            rollout_data["advantages"] = list(rollout_data["returns"])
    if args.use_opd:
        rollout_data["advantages"] = apply_opd_kl_to_advantages(
            args, rollout_data, rollout_data["advantages"], log_probs
        )
    if args.normalize_advantages:
        group = parallel_state.get_data_parallel_group()
        rollout_data["advantages"] = whiten(rollout_data["advantages"], masks, group)


def _estimate_with_values(args: Args, rollout_data: dict[str, Any], rewards: torch.Tensor, kl_coef: float) -> None:
    """GAE with the critic's `values`."""
    masks = rollout_data["loss_masks"]
    rollout_data["advantages"], rollout_data["returns"] = get_advantages_and_returns_batch(
        rollout_data["total_lengths"],
        rollout_data["response_lengths"],
        rollout_data["values"],
        get_token_rewards(rewards, rollout_data["kl"], masks, kl_coef),
        args.gamma,
        args.lambd,
        loss_masks=masks,
    )


def _call_custom(args: Args, rollout_data: dict[str, Any]) -> None:
    load_function(args.custom_advantage_function_path)(hook_args(args), rollout_data)
    for name in ("advantages", "returns"):
        if name not in rollout_data:
            raise ValueError(
                f"--custom-advantage-function-path {args.custom_advantage_function_path} did not set "
                f"rollout_data[{name!r}]"
            )
