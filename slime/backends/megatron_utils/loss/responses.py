"""The part of a micro-batch's output that belongs to its responses, sample by sample: for losses of the user's own.

It does no arithmetic; our own losses go over all rows of a micro-batch at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slime.config.args import Args


def get_responses(
    args: Args, batch: dict[str, Any], logits: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits [R, V/tp] at --rollout-temperature, tokens [R]) of each sample of a micro-batch.

    Args:
        args: `rollout_temperature`.
        batch: a micro-batch of `data.MicroBatches`; its rows on this rank count.
        logits: [1, T, V/tp]; row i of a response's part is the distribution of its token i.
    """
    rows, tokens = batch["response_rows"], batch["response_tokens"]
    lengths = batch["response_row_counts"]
    for of_sample, targets in zip(rows.split(lengths), tokens.split(lengths), strict=True):
        yield logits[0].index_select(0, of_sample) / args.rollout_temperature, targets
