"""Whitening of per-token values over all ranks that share a train step: mean 0 and variance 1 over trained tokens.

It knows nothing about what the values are, nor which ranks share: it is handed the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

VARIANCE_EPSILON = 1e-8


def whiten(
    values: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """(x - mean) / sqrt(variance + 1e-8), mean and (unbiased) variance over the trained tokens of all ranks.

    Every rank of the group must call it, also one without a trained token. Sums are float64 and in two passes, so that
    values far from 0 lose nothing.

    Args:
        values: per sample [R].
        loss_masks: per sample [R], 1 = counts; masked tokens become 0.
        group: data-parallel x context-parallel ranks; None = this rank alone.

    Returns:
        Per sample [R], float32.
    """
    lengths = [len(value) for value in values]
    nothing = torch.zeros(0)  # of a rank without samples
    x, mask = torch.cat([*values] or [nothing]).double(), torch.cat([*loss_masks] or [nothing]).bool()
    x = torch.where(mask, x, 0)  # a masked token may hold anything
    count, total = _sum_over(torch.stack([mask.sum().double(), x.sum()]), group)
    centred = torch.where(mask, x - total / count.clamp(min=1), 0)
    (squares,) = _sum_over(centred.square().sum()[None], group)
    variance = squares / (count - 1).clamp(min=1)
    return list((centred * (variance + VARIANCE_EPSILON).rsqrt()).float().split(lengths))


def _sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
