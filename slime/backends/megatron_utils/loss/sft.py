"""The loss of demonstrations: minus the log-probability of each trained token.

It knows nothing about how tokens are averaged: `sum_of_sample_mean` is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slime.backends.megatron_utils.loss.deferred_logits import DeferredLogits
from slime.backends.megatron_utils.loss.log_probs import get_log_probs_and_entropy
from slime.config.args import Args


def sft_loss_function(
    args: Args,
    batch: dict[str, Any],
    logits: torch.Tensor | DeferredLogits,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of one micro-batch, both summed by `sum_of_sample_mean` (logits [1, T, V/tp])."""
    log_probs, _ = get_log_probs_and_entropy(args, batch, logits)
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss}
