"""Losses by `--loss-type`, each `fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`, and their weight.

A loss sums over its micro-batch; `loss_function` scales the sum so that gradients accumulated over micro-batches and
averaged over data-parallel ranks (as Megatron does) are those of the mean over the whole train step, however it is
split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils.loss.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.loss.aggregation import loss_reducer
from slime.backends.megatron_utils.loss.deferred_logits import DeferredLogits
from slime.backends.megatron_utils.loss.distillation import apply_opd_kl_to_advantages
from slime.backends.megatron_utils.loss.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.loss.off_policy import icepop_function, vanilla_tis_function
from slime.backends.megatron_utils.loss.policy import policy_loss_function
from slime.backends.megatron_utils.loss.prediction import prediction_loss
from slime.backends.megatron_utils.loss.reducers import pack_report
from slime.backends.megatron_utils.loss.responses import get_responses
from slime.backends.megatron_utils.loss.sft import sft_loss_function
from slime.backends.megatron_utils.loss.value import get_values, value_loss_function
from slime.config.args import Args
from slime.utils.misc import hook_args, load_function

__all__ = [
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]

LOSS_FUNCTIONS: dict[str, Callable[..., tuple[torch.Tensor, dict[str, Any]]]] = {
    "policy_loss": policy_loss_function,
    "sft_loss": sft_loss_function,
    "value_loss": value_loss_function,
}


def loss_function(
    args: Args,
    batch: dict[str, Any],
    logits: torch.Tensor | DeferredLogits,
    *,
    num_microbatches: int,
    global_batch_size: int,
    dp_size: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss of one micro-batch in the form that Megatron's schedules take.

    Args:
        args: `loss_type`, `custom_loss_function_path`, `calculate_per_token_loss`, `recompute_loss_function` and what
            the loss reads.
        batch: a micro-batch of `data.MicroBatches`.
        logits: [1, T, V/tp], or what they are made of.
        num_microbatches: of this rank in the train step; Megatron divides by it.
        global_batch_size: rollouts of the train step over all ranks.
        dp_size: data- times context-parallel ranks; Megatron averages gradients over them.

    Returns:
        the scaled loss; the tokens that Megatron divides the step by (1 unless the loss is per token); the report that
        `reducers.reduce_reports` takes.
    """
    sum_of_sample_mean = loss_reducer(args, batch, batch["loss_masks"])
    if args.loss_type == "custom_loss":
        function = functools.partial(load_function(args.custom_loss_function_path), hook_args(args))
    else:
        function = functools.partial(LOSS_FUNCTIONS[args.loss_type], args)
    if args.recompute_loss_function and args.loss_type == "custom_loss":
        # Which tensors a loss of the user's own keeps is not known: it is run again as a whole.
        function = functools.partial(checkpoint, function, use_reentrant=False)
    loss, metrics = function(batch, logits, sum_of_sample_mean)
    objective = loss
    if batch.get("predictions"):
        of_predictions, more_metrics = prediction_loss(args, batch, sum_of_sample_mean)
        objective, metrics = loss + of_predictions, metrics | more_metrics
    # Megatron sums over data- and context-parallel ranks, a report is summed over the former alone
    num_tokens = batch["full_loss_masks"].sum(dtype=torch.int32)
    report = pack_report({"loss": loss, **metrics}, torch.cat(batch["loss_masks"]).sum(dtype=torch.int32))
    if args.calculate_per_token_loss:
        return objective, num_tokens, report
    # 1 token: Megatron's division by tokens is then none, and only its division by micro-batches has to be undone
    scaled = objective * (num_microbatches * dp_size / global_batch_size)
    return scaled, torch.ones_like(num_tokens), report
