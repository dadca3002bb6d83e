"""The critic's loss: the squared error of its values, bounded below by what clipped values would have (PPO).

A value that moves further than --value-clip from the one before the update is not followed there (as in
arXiv 1707.06347's code): the larger of the two errors counts. There is no factor of 1/2. It knows nothing about how
returns are made or how tokens are averaged.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.loss.aggregation import Reducer, metric_reducer, zero_masked
from slime.backends.megatron_utils.loss.log_probs import whole_responses
from slime.config.args import Args


def get_values(args: Args, batch: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
    """The critic's value before each response token, [sum of R], float32, the samples' tokens in order.

    Args:
        args: unused; every function of this kind takes it.
        batch: a micro-batch of `data.MicroBatches`.
        values: [1, T, 1], the output of a model with a value head.
    """
    return whole_responses(batch, values[0, :, 0].float().index_select(0, batch["response_rows"]))


def value_loss_function(
    args: Args, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of one micro-batch, each a sum over it.

    Args:
        args: `value_clip`, and what the reducer of metrics reads.
        batch: a micro-batch with `values`, those before the rollout's first update, and `returns`.
        logits: [1, T, 1], the critic's output.
        sum_of_sample_mean: [sum of R] -> scalar, of --loss-agg-mode.

    Returns:
        the loss; `value_loss` and `value_clipfrac`, the share of tokens whose clipped error is the larger one.
    """
    values = get_values(args, batch, logits)
    before, returns = (zero_masked(batch, torch.cat(batch[name])) for name in ("values", "returns"))
    losses, is_clipped = clipped_value_loss(values, before, returns, args.value_clip)
    loss = sum_of_sample_mean(losses)
    mean = metric_reducer(args, batch, batch["loss_masks"])
    return loss, {"value_loss": loss, "value_clipfrac": mean(is_clipped)}


def clipped_value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (V' - R)^2) with V' = V clipped to `before` +- value_clip, and 1.0 where V' decides.

    All are of one shape.
    """
    clipped = before + (values - before).clamp(-value_clip, value_clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(error, clipped_error), (clipped_error > error).float()
