"""Returns and advantages of each response token from rewards.

Pure functions over ragged lists of tensors; they subtract no baseline of a group (slime.rollout.rewards does) and do
not whiten. A masked token is none of the policy's actions: it is skipped, has the value 0 where an estimator goes
token by token, and takes no part in discounting.
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
    return list(torch.repeat_interleave(rewards.float(), repeats, output_size=sum(lengths)).split(lengths))


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of r_t = -kl_coef * kl_t, plus the reward on the last token.

    Tokens are the trained ones, so the reward is on the last trained token; a fully masked sample gets zeros.

    Args:
        rewards: [S].
        kl: per sample [R].
        loss_masks: per sample [R], 1 = trained.
        kl_coef: weight of the KL penalty.
        gamma: discount per trained token.

    Returns:
        Per sample [R], float32.
    """
    returns = []
    for reward, sample_kl, mask in zip(rewards, kl, loss_masks, strict=True):
        trained = mask.bool()
        token_rewards = -kl_coef * sample_kl[trained].float()
        of_sample = torch.zeros_like(sample_kl, dtype=torch.float32)
        if len(token_rewards):
            token_rewards[-1] += reward
            of_sample[trained] = chunked_discounted_returns(token_rewards, gamma)
        returns.append(of_sample)
    return returns


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor, kl: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """REINFORCE++ with the group's mean as baseline (same paper): A_t = (r - mean of the group) - kl_coef * kl_t.

    Args:
        rewards: [S], the group's mean subtracted.
        kl: per sample [R].
        loss_masks: per sample [R], 1 = trained; masked tokens get 0.
        kl_coef: weight of the KL penalty.
    """
    return [
        torch.where(mask.bool(), reward.float() - kl_coef * sample_kl.float(), 0.0)
        for reward, sample_kl, mask in zip(rewards, kl, loss_masks, strict=True)
    ]


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """G_t = r_t + discount * G_(t+1), over the last dimension, a chunk of steps per matrix product.

    Args:
        rewards: [..., T].
        discount: between 0 and 1.
        chunk_size: steps of a chunk; the result does not depend on it.
    """
    # float64: over 100,000 steps float32 rounding adds up to more than 1e-5, and matrix products may run in tf32.
    exact = rewards.double()
    returns = torch.empty_like(exact)
    carry = exact.new_zeros(exact.shape[:-1])
    power = torch.arange(chunk_size, device=rewards.device)
    exponent = power[:, None] - power[None, :]
    # [j, i] = discount^(j - i): what the reward of step j is worth at step i <= j
    weights = torch.where(exponent >= 0, discount ** exponent.clamp(min=0).double(), 0)
    for end in range(rewards.shape[-1], 0, -chunk_size):
        start = max(end - chunk_size, 0)
        size = end - start
        later = carry[..., None] * discount ** (size - power[:size]).double()
        returns[..., start:end] = exact[..., start:end] @ weights[:size, :size] + later
        carry = returns[..., start]
    return returns.to(rewards.dtype)
