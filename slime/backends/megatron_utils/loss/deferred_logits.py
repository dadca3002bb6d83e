"""Logits that exist only a chunk at a time: --recompute-loss-function.

Of the model's output the hidden states are kept; the output layer, the log-probs and the entropy of a chunk of rows
are computed together, and again in the backward pass. So no more than a chunk of logits is ever in memory, where the
logits of a micro-batch (tokens x vocabulary, in fp32) are often the largest tensor of a train step. It knows nothing
about losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

DEFAULT_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class DeferredLogits:
    """What logits are made of: rows @ weight.T."""

    hidden: torch.Tensor
    """[T, H], the last hidden states, whole on every tensor-parallel rank."""
    weight: torch.Tensor
    """[V/tp, H], this rank's part of the output layer."""

    def map_rows(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        chunk_size: int,
    ) -> list[torch.Tensor]:
        """Apply function(logits [n, V/tp], targets [n]) -> tensors [n] to chunks of rows; returns them joined.

        Args:
            rows: [N] indices into the T rows.
            targets: [N].
            chunk_size: rows of a chunk; -1 takes DEFAULT_CHUNK_ROWS.
        """
        size = chunk_size if chunk_size > 0 else DEFAULT_CHUNK_ROWS
        hidden = self.hidden.index_select(0, rows)

        def of_chunk(chunk: torch.Tensor, chunk_targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(torch.nn.functional.linear(chunk, self.weight), chunk_targets)

        parts = [
            # There is nothing random in it whose state would have to be restored.
            checkpoint(of_chunk, chunk, chunk_targets, use_reentrant=False, preserve_rng_state=False)
            for chunk, chunk_targets in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]
