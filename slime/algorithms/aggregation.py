"""Reducers of a micro-batch's per-token values: of the loss, by --loss-agg-mode, and of what is only reported.

With m the number of rollouts of a train step (executions: samples of one rollout count together):

| mode | a train step's loss |
|---|---|
| token-mean | sum of all trained tokens / their number |
| seq-mean-token-mean | mean over rollouts of (sum of its trained tokens / their number) |
| seq-mean-token-sum | mean over rollouts of the sum of its trained tokens |
| seq-mean-token-sum-norm | the same / --rollout-max-response-len, a constant (Dr.GRPO, arXiv 2503.20783) |

Here is the sum over a micro-batch; the trainer divides by the step's rollouts or tokens.
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
