"""Masked importance sampling: weights, rejection and veto for tokens that the engine sampled from another policy.

`compute_mis` is a --custom-tis-function-path, `measure_batch` the --rollout-data-postprocess-path that it needs for
`tis_batch_normalize`. With x_t = trainer's old log-prob - engine's log-prob of a trained token, a level says what a
ratio is of:

    token       w_t = exp(x_t)
    sequence    w = exp(sum of x_t over the sample's trained tokens), the same for each of them; unbiased, but noisy
    geometric   w = exp(mean of x_t over them); comparable over lengths

Settings are attributes of args, from the file of --custom-config-path (`Settings`). Log-ratios are clamped to
[-20, 20] before exp. It knows nothing about how tokens are averaged; ranks that share a batch are Megatron's
data-parallel group.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
MAX_LOG_RATIO = 20.0
FLAGS = ("tis_clip", "tis_clip_low")
"""slime's own flags of TIS, which these hooks do not read."""

batch_mean: dict[str, float] = {}
"""What `measure_batch` found last, in this trainer's process."""

Columns = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """What a file can set; see README.md."""

    tis_level: str = "token"
    tis_mode: str = "truncate"
    """truncate: min(w, upper); clip: also max(w, lower); mask: 0 outside the bounds."""
    tis_lower_bound: float | None = None
    """None: 1 / upper."""
    tis_upper_bound: float = 2.0
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over what is kept of the rollout."""
    use_rs: bool = False
    """Rejection: what is outside the bounds (token: a token, else a sample) takes no part in any loss."""
    rs_level: str = "geometric"
    rs_lower_bound: float | None = None
    """None: 1 / upper."""
    rs_upper_bound: float | None = None
    """None: tis_upper_bound."""
    rs_veto_threshold: float | None = None
    """A sample with a trained token below it takes no part in any loss; None: no veto."""

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """Those of a run whose settings are right (`check_args`)."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def bounds(self, of_rejection: bool = False) -> tuple[float, float]:
        """(lower, upper) of the weights, or of the rejection."""
        upper, lower = self.tis_upper_bound, self.tis_lower_bound
        if of_rejection:
            upper, lower = self.rs_upper_bound or upper, self.rs_lower_bound
        return 1 / upper if lower is None else lower, upper


def check_args(args: Namespace) -> Iterator[str]:
    """A sentence for each setting that is unknown or cannot be; slime asks before a run starts."""
    settings = Settings.of(args)
    names = sorted(vars(settings))
    for name in vars(args):
        if name.startswith(("tis_", "rs_")) and name not in names and name not in FLAGS:
            yield f"--custom-config-path: {name} is no setting of MIS; it has {', '.join(names)}."
    problems = list(_value_problems(settings))
    if not problems:
        for name, is_rejection in (("tis_lower_bound", False), ("rs_lower_bound", True)):
            lower, upper = settings.bounds(is_rejection)
            if lower > upper:
                problems.append((name, f"is above the upper bound {upper}; lower it"))
    for name, problem in problems:
        yield f"--custom-config-path: {name} {getattr(settings, name)!r} {problem}."
    if settings.tis_batch_normalize is True:
        needs = "--custom-config-path: tis_batch_normalize needs"
        if not args.recompute_old_log_probs:
            yield f"{needs} --recompute-old-log-probs: the mean is of a whole rollout."
        if not args.rollout_data_postprocess_path:
            yield f"{needs} --rollout-data-postprocess-path {__name__}.measure_batch."


def _value_problems(settings: Settings) -> Iterator[tuple[str, str]]:
    for name, allowed in (("tis_level", LEVELS), ("rs_level", LEVELS), ("tis_mode", MODES)):
        if getattr(settings, name) not in allowed:
            yield name, f"is none of {', '.join(allowed)}"
    for name in ("tis_batch_normalize", "use_rs"):
        if not isinstance(getattr(settings, name), bool):
            yield name, "is not true or false"
    for name in ("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        value = getattr(settings, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value >= 0) and not (value is None and name != "tis_upper_bound"):
            yield name, "is no number of at least 0"
        elif name.endswith("upper_bound") and value == 0:
            yield name, "leaves nothing; give a bound above 0"


@dataclass(frozen=True)
class Correction:
    """Weights of one batch of samples, each per sample [R]."""

    ratio: list[torch.Tensor]
    """w_t of the tokens."""
    level_ratio: list[torch.Tensor]
    """w at tis_level."""
    weight: list[torch.Tensor]
    """Of the loss, before normalisation; 0 where tis_mode mask left a token or sample out."""
    kept: list[torch.Tensor]
    """Loss masks after rejection and veto."""
    rejected: list[torch.Tensor]
    vetoed: list[torch.Tensor]


def compute_mis(
    *,
    args: Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Weigh the policy loss [sum of R] and leave rejected tokens out; without --use-tis only the latter.

    Returns:
        the loss; loss masks without what is rejected; metrics per token, named mis_*.

    Raises:
        ValueError: tis_batch_normalize is set but `measure_batch` has not run.
    """
    settings = Settings.of(args)
    found = correction(settings, train_log_probs, rollout_log_probs, loss_masks)
    weight = torch.cat(found.weight)
    if settings.tis_batch_normalize:
        weight = weight / _measured_mean()
    metrics = _metrics(settings, found, weight)
    if args.use_tis:
        # where, not times: a loss of inf would make a nan of a weight of 0
        pg_loss = torch.where(weight > 0, pg_loss * weight, 0)
    return pg_loss, found.kept, metrics


compute_mis.check_args = check_args


def measure_batch(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Measure the mean weight of a rollout over all data-parallel ranks, for `compute_mis`: --ppo-epochs passes and
    train steps of the rollout share it.

    Raises:
        ValueError: the rollout lacks log-probs.
    """
    from megatron.core import parallel_state

    settings = Settings.of(args)
    missing = [name for name in ("log_probs", "rollout_log_probs") if name not in rollout_data]
    if missing:
        remedy = {
            "log_probs": "add --recompute-old-log-probs",
            "rollout_log_probs": "the rollout function returned none",
        }
        raise ValueError(f"tis_batch_normalize needs {missing[0]} of the whole rollout: {remedy[missing[0]]}.")
    columns = (rollout_data[name] for name in ("log_probs", "rollout_log_probs", "loss_masks"))
    totals = weight_totals(settings, *columns)
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        dist.all_reduce(totals, group=group)
    total, count = totals.tolist()
    batch_mean["mean"] = total / count if total > 0 else 1.0


def _measured_mean() -> float:
    if "mean" not in batch_mean:
        raise ValueError(
            "tis_batch_normalize needs --rollout-data-postprocess-path "
            "examples.train_infer_mismatch_helper.mis.measure_batch beside it, which measures the mean."
        )
    return batch_mean["mean"]


def correction(settings: Settings, train: Columns, rollout: Columns, masks: Columns) -> Correction:
    """Weights and masks of samples, each column [S][R]; a sample without a trained token has the ratio 1."""
    masks = [mask.bool() for mask in masks]
    logs = [torch.where(m, (a - b).detach().float(), 0) for a, b, m in zip(train, rollout, masks, strict=True)]
    ratio = [_exp(x) for x in logs]
    level_ratio = _at_level(settings.tis_level, logs, masks)
    weight = [_bounded(settings, w) for w in level_ratio]
    nothing = [torch.zeros_like(mask) for mask in masks]
    rejected, vetoed = nothing, nothing
    if settings.use_rs:
        lower, upper = settings.bounds(of_rejection=True)
        rejected = [(w < lower) | (w > upper) for w in _at_level(settings.rs_level, logs, masks)]
    if (threshold := settings.rs_veto_threshold) is not None:
        vetoed = [((w < threshold) & m).any().expand(len(m)) for w, m in zip(ratio, masks, strict=True)]
    kept = [m & ~r & ~v for m, r, v in zip(masks, rejected, vetoed, strict=True)]
    return Correction(ratio, level_ratio, weight, [mask.int() for mask in kept], rejected, vetoed)


def weight_totals(settings: Settings, train: Columns, rollout: Columns, masks: Columns) -> torch.Tensor:
    """(sum of the weights, their number) of what is kept of these samples and not left out by tis_mode mask, float64.

    At the token level over tokens, else over samples.
    """
    found = correction(settings, train, rollout, masks)
    kept = [k.bool() & (w > 0) for k, w in zip(found.kept, found.weight, strict=True)]
    if settings.tis_level != "token":  # one token stands for its sample
        kept = [k & (k.cumsum(0) == 1) for k in kept]
    picked = torch.cat([w[k] for w, k in zip(found.weight, kept, strict=True)]).double()
    return torch.stack([picked.sum(), picked.new_tensor(float(len(picked)))])


def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _at_level(level: str, logs: Columns, masks: Columns) -> list[torch.Tensor]:
    """Ratios [S][R]; masked tokens of `logs` are 0."""
    if level == "token":
        return [_exp(x) for x in logs]
    sums = [x.sum() for x in logs]
    if level == "geometric":
        sums = [x / mask.sum().clamp(min=1) for x, mask in zip(sums, masks, strict=True)]
    return [_exp(x).expand(len(mask)) for x, mask in zip(sums, masks, strict=True)]


def _bounded(settings: Settings, ratio: torch.Tensor) -> torch.Tensor:
    lower, upper = settings.bounds()
    if settings.tis_mode == "truncate":
        return ratio.clamp(max=upper)
    if settings.tis_mode == "clip":
        return ratio.clamp(lower, upper)
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0)


def _metrics(settings: Settings, found: Correction, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    ratio, at_level, bounded = (torch.cat(x) for x in (found.ratio, found.level_ratio, found.weight))
    lower, upper = settings.bounds()
    log_ratio = ratio.log()
    metrics = {
        "mis_ratio": ratio,
        "mis_kl": -log_ratio,
        "mis_k3_kl": ratio - 1 - log_ratio,
        "mis_weight": weight,
        "mis_clipfrac": (bounded != at_level).float(),
        "mis_below": (at_level < lower).float(),
        "mis_above": (at_level > upper).float(),
        "mis_rejected": torch.cat(found.rejected).float(),
        "mis_vetoed": torch.cat(found.vetoed).float(),
    }
    if settings.tis_batch_normalize:
        metrics["mis_batch_mean"] = torch.full_like(weight, _measured_mean())
    return metrics
