"""Corrections of the policy loss for tokens that the engine sampled from another distribution than the trainer's.

The engine rounds otherwise and may hold older weights: with w = exp(trainer's old log-prob - engine's log-prob) of a
token, an importance weight makes its loss that of the trainer's distribution. --custom-tis-function-path takes the
place of the default, TIS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slime.algorithms.aggregation import Masks
from slime.algorithms.kl import clamp_log_ratio
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import MicroBatch

if TYPE_CHECKING:
    from slime.config.args import Args

Corrected = tuple[torch.Tensor, Masks, dict[str, torch.Tensor]]
"""The loss [sum of R], the masks by which its tokens count [S][R], and metrics per token."""
Correction = Callable[[MicroBatch, torch.Tensor, Sequence[torch.Tensor]], Corrected]
"""fn(micro-batch, loss [sum of R], the trainer's log-probs before the update [S][R])."""
keeps_whole: ContextVar[bool] = ContextVar("keeps_whole", default=False)
"""Whether a hook runs whose columns are whole responses, so that it gets no part of one (see `whole_columns`)."""


@dataclass(frozen=True)
class Bounds:
    """Between which w is trusted."""

    low: float = 0.0
    high: float = 2.0

    @classmethod
    def of(cls, args: Args) -> Bounds:
        """Read --tis-clip-low and --tis-clip."""
        return cls(args.tis_clip_low, args.tis_clip)

    def truncate(self, batch: MicroBatch, pg_loss: torch.Tensor, train_log_probs: Sequence[torch.Tensor]) -> Corrected:
        """Truncated importance sampling: the loss of a token times clamp(w, low, high).

        The metrics are `tis` (w), `tis_clipfrac` and `tis_abs` (|w - 1|); the masks stay.
        """
        ratio = _ratio(train_log_probs, batch["rollout_log_probs"])
        weight = ratio.clamp(self.low, self.high)
        return pg_loss * weight, batch["loss_masks"], _metrics(ratio, weight)

    def drop(self, batch: MicroBatch, pg_loss: torch.Tensor, train_log_probs: Sequence[torch.Tensor]) -> Corrected:
        """IcePop (Ring-1T, arXiv 2510.18855): as TIS, but a token whose w is outside the bounds has no loss at all."""
        ratio = _ratio(train_log_probs, batch["rollout_log_probs"])
        inside = (ratio >= self.low) & (ratio <= self.high)
        weight = torch.where(inside, ratio, 0)
        # where, not times: a loss of inf would make a nan of a weight of 0
        return torch.where(inside, pg_loss * weight, 0), batch["loss_masks"], _metrics(ratio, weight)


def correction_of(args: Args) -> Correction | None:
    """Return --custom-tis-function-path, or TIS; None without --use-tis and --get-mismatch-metrics."""
    if not (args.use_tis or args.get_mismatch_metrics):
        return None
    path = args.custom_tis_function_path
    return functools.partial(_call_hook, path, args) if path else Bounds.of(args).truncate


def _call_hook(
    path: str, args: Args, batch: MicroBatch, pg_loss: torch.Tensor, train_log_probs: Sequence[torch.Tensor]
) -> Corrected:
    hook: Callable[..., Corrected] = load_function(path)
    with whole_columns():
        return hook(
            args=hook_args(args),
            pg_loss=pg_loss,
            train_log_probs=list(train_log_probs),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )


@contextmanager
def whole_columns() -> Iterator[None]:
    """Make `cp_utils.slice_log_prob_with_cp` leave whole responses whole: for hooks that combine its result with such
    columns.

    A hook that gathers log-probs, computes weights of whole responses and cuts these again, as it had to where columns
    were a rank's part, so works on whole columns too.
    """
    token = keeps_whole.set(True)
    try:
        yield
    finally:
        keeps_whole.reset(token)


def _ratio(train_log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    log_ratio = torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))
    return clamp_log_ratio(log_ratio).exp().detach()


def _metrics(ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}
