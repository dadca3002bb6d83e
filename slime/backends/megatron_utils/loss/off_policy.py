"""Corrections of the policy loss for tokens that the engine sampled from another distribution than the trainer's.

The engine rounds otherwise and may hold older weights: with w = exp(trainer's old log-prob - engine's log-prob) of a
token, an importance weight makes its loss that of the trainer's distribution. A function of this kind can be given
with --custom-tis-function-path. They know nothing about how tokens are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.algorithms.kl import clamp_log_ratio
from slime.backends.megatron_utils.cp_utils import whole_columns
from slime.config.args import Args
from slime.utils.misc import hook_args, load_function

Corrected = tuple[torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]]


def vanilla_tis_function(
    *,
    args: Args,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Corrected:
    """Truncated importance sampling: the loss of a token times clamp(w, --tis-clip-low, --tis-clip).

    Returns:
        the loss [sum of R]; the masks, unchanged; metrics per token: `tis` (w), `tis_clipfrac`, `tis_abs` (|w - 1|).
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, _metrics(ratio, weight)


def icepop_function(
    *,
    args: Args,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Corrected:
    """IcePop (Ring-1T, arXiv 2510.18855): as TIS, but a token whose w is outside the bounds has no loss at all."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, 0)
    # where, not times: a loss of inf would make a nan of a weight of 0
    return torch.where(inside, pg_loss * weight, 0), loss_masks, _metrics(ratio, weight)


def correct(
    args: Args, batch: dict[str, Any], pg_loss: torch.Tensor, train_log_probs: Sequence[torch.Tensor]
) -> Corrected:
    """Apply --custom-tis-function-path, or TIS.

    Args:
        args: `custom_tis_function_path` and what the function reads.
        batch: a micro-batch with `rollout_log_probs`.
        pg_loss: [sum of R].
        train_log_probs: [S][R], the trainer's before the update.

    Raises:
        ValueError: the samples have no engine log-probs.
    """
    if "rollout_log_probs" not in batch:
        raise ValueError(
            "--use-tis and --get-mismatch-metrics need samples with rollout_log_probs; the rollout returned none"
        )
    path = args.custom_tis_function_path
    function: Callable[..., Corrected] = load_function(path) if path else vanilla_tis_function
    with whole_columns():
        return function(
            args=hook_args(args),
            pg_loss=pg_loss,
            train_log_probs=list(train_log_probs),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )


def _ratio(train_log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    log_ratio = torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))
    return clamp_log_ratio(log_ratio).exp().detach()


def _metrics(ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}
