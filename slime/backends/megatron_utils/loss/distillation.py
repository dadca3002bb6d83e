"""The penalty of on-policy distillation: how much more likely a sampled token is for the student than for its teacher.

It works on columns of log-probs and knows nothing about where the teacher ran (--opd-type).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.config.args import Args


def apply_opd_kl_to_advantages(
    args: Args,
    rollout_data: dict[str, Any],
    advantages: Sequence[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """A - `--opd-kl-coef` * (log p_student - log p_teacher) on every trained token (GKD, 2306.13649).

    Over tokens that the student samples, the mean of the difference is KL(student || teacher), the reverse KL; it is
    left in the column `opd_reverse_kl` [S][R], 0 on masked tokens.

    Args:
        args: `opd_kl_coef`.
        rollout_data: with `loss_masks` and `teacher_log_probs` [S][R]; gets `opd_reverse_kl`.
        advantages: [S][R] float32.
        student_log_probs: [S][R], of the policy before training on the rollout.

    Returns:
        New advantages [S][R]; those of masked tokens are as they were.

    Raises:
        ValueError: the rollout has no teacher's log-probs, or there are none of the student.
    """
    teacher_log_probs = rollout_data.get("teacher_log_probs")
    if teacher_log_probs is None or student_log_probs is None:
        missing = "teacher" if teacher_log_probs is None else "student"
        raise ValueError(
            f"--use-opd found no log-probs of the {missing} for this rollout; with --opd-type sglang, give "
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func or set Sample.teacher_log_probs"
        )
    masks = rollout_data["loss_masks"]
    columns = zip(student_log_probs, teacher_log_probs, masks, strict=True)
    reverse_kl = [torch.where(mask.bool(), student - teacher, 0.0) for student, teacher, mask in columns]
    rollout_data["opd_reverse_kl"] = reverse_kl
    return [advantage - args.opd_kl_coef * kl for advantage, kl in zip(advantages, reverse_kl, strict=True)]
