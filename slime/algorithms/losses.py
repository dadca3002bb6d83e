"""Losses per token, by the name that an estimator's row gives (`LOSSES`): PPO's clipped one, CISPO's; the log-ratio of
sequences that GSPO puts in place of a token's; the critic's loss; and the KL from another policy.

Where they depart from PPO as published (slime.algorithms.policy has more):

1. the clip range may be asymmetric (`eps_clip_high`, DAPO);
2. with `eps_clip_c` the loss of tokens with a negative advantage is bounded from above too (dual clip);
3. the critic's squared error has no factor of 1/2.

KL(new || base) has per-token estimators from log-probabilities of sampled tokens
(http://joschu.net/blog/kl-approx.html), and a controller of its weight. Losses neither mask nor average; reducers do,
of the loss by --loss-agg-mode, and of what is only reported. With m the number of rollouts of a train step
(executions: samples of one rollout count together):

| mode | a train step's loss |
|---|---|
| token-mean | sum of all trained tokens / their number |
| seq-mean-token-mean | mean over rollouts of (sum of its trained tokens / their number) |
| seq-mean-token-sum | mean over rollouts of the sum of its trained tokens |
| seq-mean-token-sum-norm | the same / --rollout-max-response-len, a constant (Dr.GRPO, arXiv 2503.20783) |

A reducer sums over a micro-batch; the trainer divides by the step's rollouts or tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slime.utils.accelerator import to_device
from slime.utils.misc import needed
from slime.utils.train_data import MicroBatch

if TYPE_CHECKING:
    from slime.config.args import Args

Reducer = Callable[[torch.Tensor], torch.Tensor]
"""[sum of R] -> scalar."""
Masks = Sequence[torch.Tensor]


def zero_masked(loss_masks: Masks, values: torch.Tensor) -> torch.Tensor:
    """Put 0 in place of what masked tokens hold of values [sum of R].

    A reducer leaves masked tokens out of the sum, but the backward pass still multiplies their gradient of 0 by what
    they hold: an inf there makes a nan.
    """
    return torch.where(torch.cat(list(loss_masks)).bool(), values, 0)


def token_weights(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Masks,
    denominators: Sequence[float] | None = None,
    *,
    per_token: bool = False,
) -> torch.Tensor:
    """Return by what each token of a micro-batch counts, [sum of R]: `weighted_sum` takes it.

    Args:
        total_lengths: [S] prompt + R.
        response_lengths: [S] R.
        loss_masks: [S][R], 1 = counts.
        denominators: [S] what each sample's sum is divided by; default: its own number of trained tokens. Less than 1
            counts as 1.
        per_token: divide by nothing.

    Raises:
        ValueError: a mask that is not as long as its response, or longer than its sample.
    """
    for total, response, mask in zip(total_lengths, response_lengths, loss_masks, strict=True):
        if len(mask) != response or response > total:
            raise ValueError(f"a response of {response} tokens in a sample of {total} has a loss mask of {len(mask)}")
    weights = torch.cat(list(loss_masks)).float()
    if per_token:
        return weights
    num_tokens, lengths = len(weights), to_device(torch.tensor(response_lengths), weights.device)
    if denominators is None:
        ids = torch.arange(len(lengths), device=weights.device).repeat_interleave(lengths, output_size=num_tokens)
        counts = weights.new_zeros(len(lengths)).index_add_(0, ids, weights)
    else:
        counts = to_device(torch.tensor(denominators, dtype=torch.float32), weights.device)
    return weights / counts.clamp(min=1).repeat_interleave(lengths, output_size=num_tokens)


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of values [sum of R] by their weights; a token of weight 0 may hold anything, also inf or nan."""
    return (torch.where(weights > 0, values, 0) * weights).sum()


@dataclass(frozen=True)
class Aggregation:
    """How values of tokens become one number of a micro-batch."""

    mode: str = "seq-mean-token-mean"
    per_token: bool = False
    """The mode is token-mean."""
    max_response_len: int | None = None

    @classmethod
    def of(cls, args: Args) -> Aggregation:
        """Read --loss-agg-mode, --calculate-per-token-loss and --rollout-max-response-len."""
        return cls(args.loss_agg_mode, args.calculate_per_token_loss, args.rollout_max_response_len)

    def of_loss(self, batch: MicroBatch, loss_masks: Masks) -> Reducer:
        """Return the reducer of the loss.

        Args:
            batch: a micro-batch.
            loss_masks: [S][R]; the batch's own, or fewer tokens of them, which then count as zeros: what the sums are
                divided by stays.
        """
        if self.mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
            return self.of_metrics(batch, loss_masks)
        constant = needed(self.max_response_len) if self.mode.endswith("norm") else 1
        lengths = (batch["total_lengths"], batch["response_lengths"])
        return functools.partial(weighted_sum, token_weights(*lengths, loss_masks, [constant] * len(loss_masks)))

    def of_metrics(self, batch: MicroBatch, loss_masks: Masks) -> Reducer:
        """Return the mean of a rollout's tokens, or of the step's with token-mean, in every mode."""
        lengths = (batch["total_lengths"], batch["response_lengths"])
        weights = token_weights(*lengths, loss_masks, batch.get("rollout_mask_sums"), per_token=self.per_token)
        return functools.partial(weighted_sum, weights)


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


@dataclass(frozen=True)
class Clip:
    """How far the ratio of new to old probability is followed: see `compute_policy_loss`."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator of each token.

    Args:
        ppo_kl: old minus new log-probability of the sampled token; the ratio is exp(-ppo_kl), of at most 20 nats.
        advantages: advantage of each token, same shape.
        eps_clip: the ratio is not followed below 1 - eps_clip (for negative advantages),
        eps_clip_high: nor above 1 + eps_clip_high (for positive ones).
        eps_clip_c: dual clip: a token with negative advantage A costs at most -eps_clip_c * A; None = no bound.

    Returns:
        pg_losses and clipfrac (1.0 where the ratio's clip decides the loss), same shape.

    Raises:
        ValueError: `eps_clip_c` is not above 1.
    """
    ratio = torch.exp(clamp_log_ratio(-ppo_kl))
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


def compute_cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) * A * log p: a clipped token still has a gradient, that of its
    log-probability with a bounded weight (MiniMax-M1, arXiv 2506.13585).

    Args:
        ppo_kl: old minus new log-probability of each token.
        log_probs: the new log-probability, through which the gradient goes.
        advantages: same shape.
        eps_clip: 1 or more leaves the ratio unbounded from below, as in the paper.
        eps_clip_high: bound from above.

    Returns:
        pg_losses and clipfrac (1.0 where the clip changed the ratio), same shape.
    """
    ratio = torch.exp(clamp_log_ratio(-ppo_kl.detach()))
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Clip], tuple[torch.Tensor, torch.Tensor]]] = {
    "clipped": lambda ppo_kl, log_probs, advantages, clip: compute_policy_loss(
        ppo_kl, advantages, clip.low, clip.high, clip.dual
    ),
    "cispo": lambda ppo_kl, log_probs, advantages, clip: compute_cispo_loss(
        ppo_kl, log_probs, advantages, clip.low, clip.high
    ),
}
"""Name -> fn(old minus new log-prob, new log-prob, advantage, clip) -> (loss, clip indicator), per token."""


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Old minus new log-probability, averaged over each sample's trained tokens and given to all of its tokens, so
    that the ratio is that of sequences, by their length (GSPO, arXiv 2507.18071).

    Args:
        full_log_probs: per sample [R], new.
        full_old_log_probs: per sample [R].
        local_log_probs: per sample, this rank's part of the response (all of it without context parallelism).
        loss_masks: per sample [R]; a fully masked sample has 0.

    Returns:
        [sum of the local parts].
    """
    parts = []
    for new, old, local, mask in zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True):
        parts.append(masked_mean(old - new, mask).expand_as(local))
    return torch.cat(parts)


def compute_opsm_mask(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    opsm_delta: float,
) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): 0 for the tokens with a negative advantage of a
    sample that the policy has moved away from, where mean_t(old - new) over its trained tokens > `opsm_delta`; else 1.

    Args:
        full_log_probs: per sample [R], new.
        full_old_log_probs: per sample [R].
        advantages: per sample [R].
        loss_masks: per sample [R].
        opsm_delta: in nats per token.

    Returns:
        [sum of R], without gradient.
    """
    keep = []
    for new, old, advantage, mask in zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True):
        is_far = masked_mean(old - new, mask) > opsm_delta
        keep.append(1 - (is_far & (advantage < 0)).float())
    return torch.cat(keep)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values whose mask is not 0 (scalar; 0 where there is none). A masked value may be inf or nan."""
    return torch.where(mask.bool(), values, 0).sum() / mask.bool().sum().clamp(min=1)


def clipped_value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (V' - R)^2) with V' = V clipped to `before` +- value_clip, and 1.0 where V' decides.

    A value that moves further from the one before the update is not followed there, as in arXiv 1707.06347's code. All
    are of one shape.
    """
    # not before + (values - before).clamp(...), which differs from a value that the clip leaves alone by rounding
    clipped = values.clamp(before - value_clip, before + value_clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(error, clipped_error), (clipped_error > error).float()
