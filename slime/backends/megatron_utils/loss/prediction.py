"""The loss of layers that predict further tokens (--enable-mtp-training): minus log-probs of response tokens.

Each layer's loss is averaged as the policy's: the same tokens count, by the same weights. It knows nothing about the
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.backends.megatron_utils.cp_utils import gather_responses
from slime.config.args import Args


def prediction_loss(
    args: Args, batch: dict[str, Any], sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of one micro-batch, both summed by `sum_of_sample_mean`.

    Args:
        args: `mtp_loss_scaling_factor`, `log_probs_chunk_size`, `vocab_size`.
        batch: a micro-batch whose `predictions` are each layer's logits (DeferredLogits).
        sum_of_sample_mean: [sum of R] -> scalar.

    Returns:
        --mtp-loss-scaling-factor times the mean over layers; that mean without the factor, and each layer's.
    """
    losses = [-sum_of_sample_mean(_log_probs(args, batch, layer)) for layer in range(len(batch["predictions"]))]
    mean = torch.stack(losses).mean()
    metrics = {"mtp_loss": mean} | {f"mtp_{i + 1}_loss": loss for i, loss in enumerate(losses)}
    return args.mtp_loss_scaling_factor * mean, metrics


def _log_probs(args: Args, batch: dict[str, Any], layer: int) -> torch.Tensor:
    """[sum of R]; 0 for a token that has too few before it to be predicted from."""
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def of_rows(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_probs, _ = calculate_log_probs_and_entropy(
            logits, targets, tp_group, False, args.log_probs_chunk_size, vocab_size=args.vocab_size
        )
        return (log_probs,)

    rows, targets = batch["prediction_rows"][layer], batch["prediction_targets"][layer]
    (values,) = batch["predictions"][layer].map_rows(of_rows, rows, targets, chunk_size=args.log_probs_chunk_size)
    places, length = batch["prediction_places"][layer], sum(batch["response_lengths"])
    if "response_places" not in batch:  # there is no context parallelism: they are all here
        return values.new_zeros(length).index_copy(0, places, values)
    return gather_responses(values, places, length, parallel_state.get_context_parallel_group())
