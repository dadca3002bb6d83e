"""Returns and advantages of each response token from rewards.

Pure functions over ragged lists of tensors; they do not normalise rewards (slime.rollout.rewards does, by group).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def get_grpo_returns(rewards: torch.Tensor, kl: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every token of a response gets the response's reward.

    Args:
        rewards: [S], already normalised within each group.
        kl: per sample [R]; only its shape is used.

    Returns:
        Per sample [R], float32; views of one tensor.
    """
    lengths = [len(sample) for sample in kl]
    repeats = torch.tensor(lengths, device=rewards.device)
    return list(torch.repeat_interleave(rewards.float(), repeats).split(lengths))
