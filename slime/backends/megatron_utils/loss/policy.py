"""The policy loss of one micro-batch: clipped surrogate, entropy bonus, KL from the reference, corrections.

Where it departs from PPO as published:

1. the old log-probs may be absent: the first train step of a rollout then compares the policy with itself (ratio 1,
   which is exact when nothing was updated since);
2. with --use-rollout-logprobs they are the engine's;
3. the entropy is reported also when it is not trained on;
4. the ratio may be a sequence's (gspo), and the loss another than the clipped one (cispo): the estimator's row says.

How tokens are averaged is not decided here (loss.aggregation), nor how engine and trainer are compared
(loss.off_policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.kl import clamp_log_ratio, compute_approx_kl
from slime.algorithms.losses import LOSSES, Clip, compute_gspo_kl, compute_opsm_mask
from slime.backends.megatron_utils.loss.aggregation import (
    Reducer,
    loss_reducer,
    metric_reducer,
    pg_loss_reducer,
    zero_masked,
)
from slime.backends.megatron_utils.loss.deferred_logits import DeferredLogits
from slime.backends.megatron_utils.loss.log_probs import get_token_columns
from slime.backends.megatron_utils.loss.off_policy import correct
from slime.config.args import Args

COLUMNS = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs")


def policy_loss_function(
    args: Args, batch: dict[str, Any], logits: torch.Tensor | DeferredLogits, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of one micro-batch, each a sum over it.

    Args:
        args: `advantage_estimator`, the `eps_clip*`, `entropy_coef`, `use_kl_loss`, `kl_loss_coef`, `kl_loss_type`,
            `use_unbiased_kl`, `use_rollout_logprobs`, what the log-probs, the corrections and the reducers read.
        batch: a micro-batch with `advantages`; `log_probs`, `rollout_log_probs` and `ref_log_probs` where they exist.
        logits: [1, T, V/tp].
        sum_of_sample_mean: [sum of R] -> scalar, of --loss-agg-mode; what is only reported is always a mean.
    """
    columns = get_token_columns(args, batch, logits, with_entropy=True, with_entropy_grad=args.entropy_coef != 0)
    log_probs, entropy = zero_masked(batch, columns["log_probs"]), columns["entropy"]
    # Every ratio of a masked token is then 1, for the corrections of the user's own too.
    batch = batch | {name: _trained(batch, name) for name in COLUMNS if name in batch}
    rollout_log_probs = _flat(batch, "rollout_log_probs")
    before_update = _flat(batch, "log_probs")
    if before_update is None:
        before_update = log_probs.detach()
    old_log_probs = rollout_log_probs if args.use_rollout_logprobs else before_update
    if old_log_probs is None:
        raise ValueError("--use-rollout-logprobs needs samples with rollout_log_probs; the rollout returned none")

    pg_losses, masks, of_tokens = _pg_losses(args, batch, log_probs, old_log_probs, before_update)
    if masks is not batch["loss_masks"]:
        sum_of_sample_mean = loss_reducer(args, batch, masks)
    loss = pg_loss = pg_loss_reducer(args, batch, masks, sum_of_sample_mean)(pg_losses)
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * sum_of_sample_mean(entropy)
    of_tokens["entropy_loss"] = entropy
    if "num_kept" in columns:  # the engine's log-probs are of the whole distribution: there is nothing to compare
        of_tokens["top_p_kept_vocab_per_token"] = columns["num_kept"]
    elif rollout_log_probs is not None:
        of_tokens["train_rollout_logprob_abs_diff"] = (before_update - rollout_log_probs).abs()
    if args.use_kl_loss:
        ratio = clamp_log_ratio(log_probs - old_log_probs).exp() if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)
        loss = loss + args.kl_loss_coef * sum_of_sample_mean(kl)
        of_tokens["kl_loss"] = kl
    if "opd_reverse_kl" in batch:
        of_tokens["opd_reverse_kl"] = torch.cat(batch["opd_reverse_kl"])
    mean = metric_reducer(args, batch, batch["loss_masks"])  # also of what a correction leaves out of the losses
    reported = {name: mean(values.detach()) for name, values in of_tokens.items()}
    return loss, {"loss": loss, "pg_loss": pg_loss, **reported}


def _pg_losses(
    args: Args,
    batch: dict[str, Any],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    before_update: torch.Tensor,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]]:
    """The policy loss of each token, the masks that it counts by, and per-token metrics."""
    estimator, masks = ESTIMATORS[args.advantage_estimator], batch["loss_masks"]
    new, old = _per_sample(batch, log_probs), _per_sample(batch, old_log_probs)
    ppo_kl = compute_gspo_kl(new, old, new, masks) if estimator.ratio == "sequence" else old_log_probs - log_probs
    advantages = torch.cat(batch["advantages"])
    clip = Clip(args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    pg_losses, clipfrac = LOSSES[estimator.loss](ppo_kl, log_probs, advantages, clip)
    metrics = {"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl}
    if args.use_opsm:
        keep = compute_opsm_mask(new, old, batch["advantages"], masks, args.opsm_delta)
        pg_losses, metrics["opsm_clipfrac"] = pg_losses * keep, 1 - keep
    if args.use_tis or args.get_mismatch_metrics:
        pg_losses, masks, of_correction = correct(args, batch, pg_losses, _per_sample(batch, before_update))
        metrics |= {"ois": clamp_log_ratio(-ppo_kl).exp(), **of_correction}
    return pg_losses, masks, metrics


def _flat(batch: dict[str, Any], name: str) -> torch.Tensor | None:
    return torch.cat(batch[name]) if name in batch else None


def _trained(batch: dict[str, Any], name: str) -> list[torch.Tensor]:
    return _per_sample(batch, zero_masked(batch, torch.cat(batch[name])))


def _per_sample(batch: dict[str, Any], values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(batch["response_lengths"]))
