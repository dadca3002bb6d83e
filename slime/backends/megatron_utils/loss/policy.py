"""The policy loss of one micro-batch: clipped surrogate, entropy bonus, KL from the reference.

Where it departs from PPO as published:

1. the old log-probs may be absent: the first train step of a rollout then compares the policy with itself (ratio 1,
   which is exact when nothing was updated since);
2. with --use-rollout-logprobs they are the engine's;
3. the entropy is reported also when it is not trained on;
4. the ratio may be a sequence's (gspo), and the loss another than the clipped one (cispo): the estimator's row says.

It knows nothing about how tokens are averaged: `sum_of_sample_mean` is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slime.backends.megatron_utils.loss.deferred_logits import DeferredLogits
from slime.backends.megatron_utils.loss.log_probs import get_log_probs_and_entropy
from slime.utils.ppo_utils import ESTIMATORS, compute_approx_kl, compute_gspo_kl

Reducer = Callable[[torch.Tensor], torch.Tensor]


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: torch.Tensor | DeferredLogits, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of one micro-batch, both summed by `sum_of_sample_mean`.

    Args:
        args: `advantage_estimator`, `eps_clip`, `eps_clip_high`, `eps_clip_c`, `entropy_coef`, `use_kl_loss`,
            `kl_loss_coef`, `kl_loss_type`, `use_rollout_logprobs` and what the log-probs read.
        batch: a micro-batch with `advantages`; `log_probs`, `rollout_log_probs` and `ref_log_probs` where they exist.
        logits: [1, T, V/tp].
        sum_of_sample_mean: [sum of R] -> scalar.
    """
    log_probs, entropy = get_log_probs_and_entropy(
        args, batch, logits, with_entropy=True, with_entropy_grad=args.entropy_coef != 0
    )
    rollout_log_probs = _flat(batch, "rollout_log_probs")
    before_update = _flat(batch, "log_probs")
    if before_update is None:
        before_update = log_probs.detach()
    old_log_probs = rollout_log_probs if args.use_rollout_logprobs else before_update
    if old_log_probs is None:
        raise ValueError("--use-rollout-logprobs needs samples with rollout_log_probs; the rollout returned none")

    estimator = ESTIMATORS[args.advantage_estimator]
    ppo_kl = old_log_probs - log_probs
    if estimator.ratio == "sequence":
        new, old = _per_sample(batch, log_probs), _per_sample(batch, old_log_probs)
        ppo_kl = compute_gspo_kl(new, old, new, batch["loss_masks"])
    pg_losses, clipfrac = estimator.policy_loss_fn(
        ppo_kl, log_probs, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high, args.eps_clip_c
    )
    loss = pg_loss = sum_of_sample_mean(pg_losses)
    entropy_loss = sum_of_sample_mean(entropy)
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * entropy_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "pg_clipfrac": sum_of_sample_mean(clipfrac),
        "ppo_kl": sum_of_sample_mean(ppo_kl.detach()),
    }
    if rollout_log_probs is not None:
        diff = (before_update - rollout_log_probs).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(diff)
    if args.use_kl_loss:
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type)
        metrics["kl_loss"] = sum_of_sample_mean(kl)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, {"loss": loss, **metrics}


def _flat(batch: dict[str, Any], name: str) -> torch.Tensor | None:
    return torch.cat(batch[name]) if name in batch else None


def _per_sample(batch: dict[str, Any], values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(batch["response_lengths"]))
