"""Reducers of a micro-batch's per-token values: of the loss, by --loss-agg-mode, and of what is only reported.

With m the number of rollouts of a train step (executions: samples of one rollout count together):

| mode | a train step's loss |
|---|---|
| token-mean | sum of all trained tokens / their number |
| seq-mean-token-mean | mean over rollouts of (sum of its trained tokens / their number) |
| seq-mean-token-sum | mean over rollouts of the sum of its trained tokens |
| seq-mean-token-sum-norm | the same / --rollout-max-response-len, a constant (Dr.GRPO, arXiv 2503.20783) |

Here is the sum over a micro-batch; `loss_function` and `reduce_reports` divide by the step's rollouts or tokens. It
knows nothing about what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.config.args import Args
from slime.utils.misc import load_function, needed

Reducer = Callable[[torch.Tensor], torch.Tensor]
Masks = Sequence[torch.Tensor]


def zero_masked(batch: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
    """Put 0 in place of what masked tokens hold of values [sum of R].

    A reducer leaves masked tokens out of the sum, but the backward pass still multiplies their gradient of 0 by what
    they hold: an inf there makes a nan.
    """
    return torch.where(torch.cat(list(batch["loss_masks"])).bool(), values, 0)


def loss_reducer(args: Args, batch: dict[str, Any], loss_masks: Masks) -> Reducer:
    """[sum of R] -> scalar, by --loss-agg-mode.

    Args:
        args: `loss_agg_mode`, `calculate_per_token_loss`, `rollout_max_response_len`.
        batch: a micro-batch.
        loss_masks: [S][R]; the batch's own, or fewer tokens of them, which then count as zeros: what the sums are
            divided by stays.
    """
    if args.loss_agg_mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return metric_reducer(args, batch, loss_masks)
    constant = needed(args.rollout_max_response_len) if args.loss_agg_mode.endswith("norm") else 1
    denominators = [constant] * len(loss_masks)
    return get_sum_of_sample_mean(batch["total_lengths"], batch["response_lengths"], loss_masks, denominators)


def metric_reducer(args: Args, batch: dict[str, Any], loss_masks: Masks) -> Reducer:
    """[sum of R] -> scalar: the mean of a rollout's tokens, or of the step's with token-mean, in every mode."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        batch.get("rollout_mask_sums"),
        args.calculate_per_token_loss,
    )


def pg_loss_reducer(args: Args, batch: dict[str, Any], loss_masks: Masks, default: Reducer) -> Reducer:
    """The reducer of the policy loss: `default`, or what --custom-pg-loss-reducer-function-path returns."""
    path = args.custom_pg_loss_reducer_function_path
    if not path:
        return default
    lengths = (batch["total_lengths"], batch["response_lengths"])
    return load_function(path)(*lengths, loss_masks, args.calculate_per_token_loss)
