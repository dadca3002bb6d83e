"""From per-token values of a micro-batch to one number: the reduction that every loss and metric goes through.

The micro-batch's samples are whole on this rank: context parallelism is refused at parse time, and its slicing will
live here. It knows nothing about what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a per-token tensor over the micro-batch, weighted so that steps do not depend on its split.

    Args:
        total_lengths: [S] prompt + R.
        response_lengths: [S] R.
        loss_masks: [S][R], 1 = counts.
        sample_denoms: [S] what each sample's masked sum is divided by: the trained tokens of its whole rollout, so
            that samples of one rollout together count as one. Default: the sample's own. Less than 1 counts as 1.
        calculate_per_token_loss: plain masked sum, to be divided by the trained tokens of the whole step.

    Returns:
        x [sum of R] (the samples' tokens in order) -> scalar.

    Raises:
        ValueError: a mask that is not as long as its response, or longer than its sample.
    """
    for total, response, mask in zip(total_lengths, response_lengths, loss_masks, strict=True):
        if len(mask) != response or response > total:
            raise ValueError(f"a response of {response} tokens in a sample of {total} has a loss mask of {len(mask)}")
    weights = torch.cat(list(loss_masks)).float()
    if not calculate_per_token_loss:
        lengths = torch.tensor(response_lengths, device=weights.device)
        if sample_denoms is None:
            ids = torch.arange(len(lengths), device=weights.device).repeat_interleave(lengths)
            denominators = weights.new_zeros(len(lengths)).index_add_(0, ids, weights)
        else:
            denominators = torch.tensor(sample_denoms, device=weights.device, dtype=torch.float32)
        weights = weights / denominators.clamp(min=1).repeat_interleave(lengths)

    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        # A masked token may hold anything, also inf or nan, which times zero would be nan.
        return (torch.where(weights > 0, x, 0) * weights).sum()

    return sum_of_sample_mean
