"""Advantages of one rank's share of a rollout, from its rewards and log-probabilities, before training on it.

It adds the columns `kl`, `advantages` and `returns`, and with a teacher `opd_reverse_kl`. The baseline of a group is
subtracted before (slime.rollout.train_data), and log-probs are columns already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.algorithms.aggregation import zero_masked
from slime.algorithms.estimators import ESTIMATORS, Estimator
from slime.algorithms.losses import compute_approx_kl
from slime.algorithms.returns import RETURNS, get_advantages_and_returns_batch, get_token_rewards, whiten
from slime.plugins import function_of
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import RolloutBatch

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class Advantages:
    """How the advantages of a share are made; calling it adds them."""

    estimator: Estimator
    kl_type: str = "k1"
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    opd_coef: float | None = None
    """Weight of a teacher (--use-opd)."""
    is_whitened: bool = False
    custom: Callable[[RolloutBatch], None] | None = None
    """--custom-advantage-function-path, which takes the estimator's place."""

    @classmethod
    def of(cls, args: Args, kl_coef: float | None = None) -> Advantages:
        """Read the flags.

        Args:
            args: the flags.
            kl_coef: weight of the KL in the rewards, where a controller changes it; default: the flag's.
        """
        path = args.custom_advantage_function_path

        def custom(rollout_data: RolloutBatch) -> None:
            load_function(path)(hook_args(args), rollout_data)
            for name in ("advantages", "returns"):
                if name not in rollout_data:
                    raise ValueError(f"--custom-advantage-function-path {path} did not set rollout_data[{name!r}]")

        return cls(
            ESTIMATORS[args.advantage_estimator],
            kl_type=args.kl_loss_type,
            kl_coef=args.kl_coef if kl_coef is None else kl_coef,
            gamma=args.gamma,
            lambd=args.lambd,
            opd_coef=args.opd_kl_coef if args.use_opd else None,
            is_whitened=args.normalize_advantages,
            custom=custom if path else None,
        )

    def __call__(self, data: RolloutBatch, group: dist.ProcessGroup | None) -> None:
        """Fill `kl`, `advantages` and `returns` of a share in place, each [S][R] float32.

        Args:
            data: with `rewards`, `loss_masks`, `values` for an estimator with a critic, `log_probs` and
                `ref_log_probs` where they exist; `kl` is zero where one of them does not.
            group: ranks over which advantages are whitened.

        Raises:
            ValueError: the custom function left a column out, or there is no teacher's column.
        """
        masks = data["loss_masks"]
        log_probs, ref_log_probs = data.get("log_probs"), data.get("ref_log_probs")
        lengths = [len(mask) for mask in masks]
        if log_probs is not None and ref_log_probs is not None:
            new, base = (zero_masked(masks, torch.cat(column)) for column in (log_probs, ref_log_probs))
            kl = compute_approx_kl(new, base, self.kl_type)
        else:
            kl = torch.zeros(sum(lengths), device=masks[0].device)
        data["kl"] = list(kl.split(lengths))
        if self.custom is not None:
            self.custom(data)
        else:
            self._estimate(data)
        if self.opd_coef is not None:
            data["advantages"] = subtract_teacher(data, data["advantages"], log_probs, self.opd_coef)
        if self.is_whitened:
            data["advantages"] = whiten(data["advantages"], masks, group)

    def _estimate(self, data: RolloutBatch) -> None:
        masks = data["loss_masks"]
        rewards = torch.tensor(data["rewards"], dtype=torch.float32, device=masks[0].device)
        if not self.estimator.needs_critic:
            returns_fn = function_of(RETURNS, self.estimator.returns)
            data["returns"] = returns_fn(rewards, data["kl"], masks, self.kl_coef, self.gamma)
            data["advantages"] = list(data["returns"])
            return
        data["advantages"], data["returns"] = get_advantages_and_returns_batch(
            data["total_lengths"],
            data["response_lengths"],
            data["values"],
            get_token_rewards(rewards, data["kl"], masks, self.kl_coef),
            self.gamma,
            self.lambd,
            loss_masks=masks,
        )


def subtract_teacher(
    data: RolloutBatch,
    advantages: Sequence[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
    coef: float,
) -> list[torch.Tensor]:
    """A - coef * (log p_student - log p_teacher) on every trained token: on-policy distillation (GKD, 2306.13649).

    Over tokens that the student samples, the mean of the difference is KL(student || teacher), the reverse KL; it is
    left in the column `opd_reverse_kl` [S][R], 0 on masked tokens.

    Args:
        data: with `loss_masks` and `teacher_log_probs` [S][R]; gets `opd_reverse_kl`.
        advantages: [S][R] float32.
        student_log_probs: [S][R], of the policy before training on the rollout.
        coef: --opd-kl-coef.

    Returns:
        New advantages [S][R]; those of masked tokens are as they were.

    Raises:
        ValueError: the rollout has no teacher's log-probs, or there are none of the student.
    """
    teacher_log_probs = data.get("teacher_log_probs")
    if teacher_log_probs is None or student_log_probs is None:
        missing = "teacher" if teacher_log_probs is None else "student"
        raise ValueError(
            f"--use-opd found no log-probs of the {missing} for this rollout; with --opd-type sglang, give "
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func or set Sample.teacher_log_probs"
        )
    columns = zip(student_log_probs, teacher_log_probs, data["loss_masks"], strict=True)
    reverse_kl = [torch.where(mask.bool(), student - teacher, 0.0) for student, teacher, mask in columns]
    data["opd_reverse_kl"] = reverse_kl
    return [advantage - coef * kl for advantage, kl in zip(advantages, reverse_kl, strict=True)]
