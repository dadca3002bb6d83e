"""The policy loss of one micro-batch: clipped surrogate, entropy bonus, KL from the reference, corrections.

Where it departs from PPO as published:

1. the old log-probs may be absent: the first train step of a rollout then compares the policy with itself (ratio 1,
   which is exact when nothing was updated since);
2. with --use-rollout-logprobs they are the engine's;
3. the entropy is reported also when it is not trained on;
4. the ratio may be a sequence's (gspo), and the loss another than the clipped one (cispo): the estimator's row says.

Corrections are for tokens that the engine sampled from another distribution than the trainer's. The engine rounds
otherwise and may hold older weights: with w = exp(trainer's old log-prob - engine's log-prob) of a token, an
importance weight makes its loss that of the trainer's distribution. --custom-tis-function-path takes the place of the
default, TIS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from slime.algorithms.estimators import ESTIMATORS, Estimator
from slime.algorithms.losses import (
    LOSSES,
    Aggregation,
    Clip,
    Masks,
    Reducer,
    clamp_log_ratio,
    compute_approx_kl,
    compute_gspo_kl,
    compute_opsm_mask,
    zero_masked,
)
from slime.plugins import function_of
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


LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]
PgReducer = Callable[[Sequence[int], Sequence[int], Masks, bool], Reducer]
"""A --custom-pg-loss-reducer-function-path."""
_Column = Literal["advantages", "log_probs", "ref_log_probs", "rollout_log_probs"]
_COLUMNS: tuple[_Column, ...] = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs")


@dataclass(frozen=True)
class KlTerm:
    """The KL from the reference as a part of the loss."""

    coef: float
    kind: str = "k1"
    is_unbiased: bool = False
    """Weigh each token's KL with new / old probability."""


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of the policy loss; calling it gives the loss and metrics of a micro-batch."""

    estimator: Estimator
    clip: Clip = Clip()
    entropy_coef: float = 0.0
    kl: KlTerm | None = None
    is_from_rollout: bool = False
    """The old log-probs are the engine's (--use-rollout-logprobs)."""
    opsm_delta: float | None = None
    correction: Correction | None = None
    aggregation: Aggregation = Aggregation()
    pg_reducer: PgReducer | None = None
    """Takes the place of the reducer of the policy-gradient part."""

    @classmethod
    def of(cls, args: Args) -> PolicyLoss:
        """Read the flags."""
        path = args.custom_pg_loss_reducer_function_path
        return cls(
            ESTIMATORS[args.advantage_estimator],
            clip=Clip(args.eps_clip, args.eps_clip_high, args.eps_clip_c),
            entropy_coef=args.entropy_coef,
            kl=KlTerm(args.kl_loss_coef, args.kl_loss_type, args.use_unbiased_kl) if args.use_kl_loss else None,
            is_from_rollout=args.use_rollout_logprobs,
            opsm_delta=args.opsm_delta if args.use_opsm else None,
            correction=correction_of(args),
            aggregation=Aggregation.of(args),
            pg_reducer=load_function(path) if path else None,
        )

    def __call__(
        self, batch: MicroBatch, columns: Mapping[str, torch.Tensor], sum_of_sample_mean: Reducer
    ) -> LossAndMetrics:
        """Loss and metrics of one micro-batch, each a sum over it.

        Args:
            batch: with `advantages`; `log_probs`, `rollout_log_probs` and `ref_log_probs` where they exist.
            columns: of the present policy, [sum of R] each: `log_probs`, `entropy`, and with --rollout-top-p
                `num_kept`, the size of each token's nucleus.
            sum_of_sample_mean: [sum of R] -> scalar, of --loss-agg-mode; what is only reported is always a mean.

        Raises:
            ValueError: the samples have no log-probs of the engine, which the flags ask for.
        """
        masks: Masks = batch["loss_masks"]
        log_probs, entropy = zero_masked(masks, columns["log_probs"]), columns["entropy"]
        batch = _without_masked(batch)
        rollout_log_probs = _flat(batch, "rollout_log_probs")
        before_update = _flat(batch, "log_probs")
        if before_update is None:
            before_update = log_probs.detach()
        old_log_probs = rollout_log_probs if self.is_from_rollout else before_update
        if old_log_probs is None:
            raise ValueError("--use-rollout-logprobs needs samples with rollout_log_probs; the rollout returned none")

        pg_losses, masks, of_tokens = self._pg_losses(batch, log_probs, old_log_probs, before_update)
        if masks is not batch["loss_masks"]:
            sum_of_sample_mean = self.aggregation.of_loss(batch, masks)
        loss = pg_loss = self._pg_reducer(batch, masks, sum_of_sample_mean)(pg_losses)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * sum_of_sample_mean(entropy)
        of_tokens["entropy_loss"] = entropy
        if "num_kept" in columns:  # the engine's log-probs are of the whole distribution: there is nothing to compare
            of_tokens["top_p_kept_vocab_per_token"] = columns["num_kept"]
        elif rollout_log_probs is not None:
            of_tokens["train_rollout_logprob_abs_diff"] = (before_update - rollout_log_probs).abs()
        if self.kl is not None:
            ratio = clamp_log_ratio(log_probs - old_log_probs).exp() if self.kl.is_unbiased else None
            kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), self.kl.kind, ratio)
            loss = loss + self.kl.coef * sum_of_sample_mean(kl)
            of_tokens["kl_loss"] = kl
        if "opd_reverse_kl" in batch:
            of_tokens["opd_reverse_kl"] = torch.cat(batch["opd_reverse_kl"])
        # also of what a correction leaves out of the losses
        mean = self.aggregation.of_metrics(batch, batch["loss_masks"])
        reported = {name: mean(values.detach()) for name, values in of_tokens.items()}
        return loss, {"loss": loss, "pg_loss": pg_loss, **reported}

    def _pg_losses(
        self, batch: MicroBatch, log_probs: torch.Tensor, old_log_probs: torch.Tensor, before_update: torch.Tensor
    ) -> tuple[torch.Tensor, Masks, dict[str, torch.Tensor]]:
        """The policy loss of each token, the masks that it counts by, and per-token metrics."""
        masks: Masks = batch["loss_masks"]
        new, old = _per_sample(batch, log_probs), _per_sample(batch, old_log_probs)
        is_sequence = self.estimator.ratio == "sequence"
        ppo_kl = compute_gspo_kl(new, old, new, masks) if is_sequence else old_log_probs - log_probs
        advantages = torch.cat(batch["advantages"])
        loss_fn = function_of(LOSSES, self.estimator.loss)
        pg_losses, clipfrac = loss_fn(ppo_kl, log_probs, advantages, self.clip)
        metrics = {"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl}
        if self.opsm_delta is not None:
            keep = compute_opsm_mask(new, old, batch["advantages"], masks, self.opsm_delta)
            pg_losses, metrics["opsm_clipfrac"] = pg_losses * keep, 1 - keep
        if self.correction is not None:
            if "rollout_log_probs" not in batch:
                raise ValueError(
                    "--use-tis and --get-mismatch-metrics need samples with rollout_log_probs; the rollout returned "
                    "none"
                )
            pg_losses, masks, of_correction = self.correction(batch, pg_losses, _per_sample(batch, before_update))
            metrics |= {"ois": clamp_log_ratio(-ppo_kl).exp(), **of_correction}
        return pg_losses, masks, metrics

    def _pg_reducer(self, batch: MicroBatch, masks: Masks, default: Reducer) -> Reducer:
        if self.pg_reducer is None:
            return default
        return self.pg_reducer(batch["total_lengths"], batch["response_lengths"], masks, self.aggregation.per_token)


def _flat(batch: MicroBatch, name: _Column) -> torch.Tensor | None:
    return torch.cat(batch[name]) if name in batch else None


def _without_masked(batch: MicroBatch) -> MicroBatch:
    """The batch with 0 for masked tokens: every ratio of one is then 1, for the corrections of the user's own too."""
    masks = batch["loss_masks"]
    zeroed = {
        name: _per_sample(batch, zero_masked(masks, torch.cat(batch[name]))) for name in _COLUMNS if name in batch
    }
    return cast(MicroBatch, {**batch, **zeroed})


def _per_sample(batch: MicroBatch, values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(batch["response_lengths"]))
