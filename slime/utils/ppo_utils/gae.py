"""Generalised advantage estimation (arXiv 1506.02438): advantages and returns of tokens from a critic's values.

With r_t and V_t of the trained tokens of one response, and 0 after the last:

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t = delta_t + gamma lambd A_(t+1)        the advantage of the policy
    R_t = A_t + V_t                            what the critic should have said

Masked tokens (tool output, template) are none of the policy's actions: the token after one follows the token before
it, as if they were neighbours. Nothing here whitens, or knows where rewards and values come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.utils.ppo_utils.returns import chunked_discounted_returns

Pair = tuple[torch.Tensor, torch.Tensor]


def vanilla_gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float) -> Pair:
    """GAE as it is written, a step at a time.

    Args:
        rewards: [..., T] of each token.
        values: [..., T], V before each token.
        gamma: discount per token.
        lambd: 1 = returns minus values, 0 = the critic's one-step errors.

    Returns:
        advantages and returns, [..., T].
    """
    deltas = _deltas(rewards, values, gamma)
    advantages = torch.empty_like(deltas)
    later = deltas.new_zeros(deltas.shape[:-1])
    for t in reversed(range(deltas.shape[-1])):
        later = deltas[..., t] + gamma * lambd * later
        advantages[..., t] = later
    return _rounded(advantages, values)


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> Pair:
    """The same numbers as `vanilla_gae`, a chunk of steps per matrix product: for long responses."""
    advantages = chunked_discounted_returns(_deltas(rewards, values, gamma), gamma * lambd, chunk_size)
    return _rounded(advantages, values)


def _rounded(advantages: torch.Tensor, values: torch.Tensor) -> Pair:
    return advantages.to(values.dtype), (advantages + values).to(values.dtype)


def _deltas(rewards: torch.Tensor, values: torch.Tensor, gamma: float) -> torch.Tensor:
    # float64: what is rounded here adds up over the steps.
    following = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1).double()
    return rewards + gamma * following - values


def get_token_rewards(
    rewards: torch.Tensor, kl: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """r_t = -kl_coef * kl_t, plus the response's reward on its last trained token; masked tokens have 0.

    Args:
        rewards: [S].
        kl: per sample [R].
        loss_masks: per sample [R], 1 = trained; the reward of a fully masked sample is nowhere.
        kl_coef: weight of the KL penalty.

    Returns:
        Per sample [R], float32.
    """
    result = []
    for reward, sample_kl, mask in zip(rewards, kl, loss_masks, strict=True):
        trained = mask.bool().nonzero()[:, 0]
        of_sample = torch.zeros_like(sample_kl, dtype=torch.float32)
        of_sample[trained] = -kl_coef * sample_kl[trained].float()
        of_sample[trained[-1:]] += reward.float()
        result.append(of_sample)
    return result


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[torch.Tensor],
    rewards_list: Sequence[torch.Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
    *,
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE of many responses at once.

    Args:
        total_lengths: [S] prompt + R.
        response_lengths: [S] R.
        values_list: per sample [R], V before each token.
        rewards_list: per sample [R], of each token.
        gamma: discount per trained token.
        lambd: of GAE.
        chunked: a chunk of steps per matrix product; False = a step at a time.
        loss_masks: per sample [R], 1 = trained; others are skipped, with advantage and return 0. None = all trained.

    Returns:
        advantages and returns, per sample [R], float32.

    Raises:
        ValueError: lengths that do not match.
    """
    if loss_masks is None:
        loss_masks = [torch.ones_like(rewards) for rewards in rewards_list]
    columns = (values_list, rewards_list, loss_masks)
    for total, response, *of_sample in zip(total_lengths, response_lengths, *columns, strict=True):
        found = [len(column) for column in of_sample]
        if any(length != response for length in found) or response > total:
            raise ValueError(
                f"a response of {response} tokens in a sample of {total} has {found} values, rewards and mask entries"
            )
    masks = [mask.bool() for mask in loss_masks]
    longest = max(int(mask.sum()) for mask in masks)
    # trained tokens side by side, one sample a row; the zeros behind a short one change nothing before them
    values, rewards = (values_list[0].new_zeros(len(masks), longest, dtype=torch.float32) for _ in range(2))
    for row, (mask, of_values, of_rewards) in enumerate(zip(masks, values_list, rewards_list, strict=True)):
        count = int(mask.sum())
        values[row, :count], rewards[row, :count] = of_values[mask].float(), of_rewards[mask].float()
    gae = chunked_gae if chunked else vanilla_gae
    advantages, returns = (_scattered(packed, masks) for packed in gae(rewards, values, gamma, lambd))
    return advantages, returns


def _scattered(packed: torch.Tensor, masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[S, trained tokens] back to their places in the responses, 0 elsewhere."""
    result = []
    for row, mask in zip(packed, masks, strict=True):
        of_sample = row.new_zeros(len(mask))
        of_sample[mask] = row[: int(mask.sum())]
        result.append(of_sample)
    return result
