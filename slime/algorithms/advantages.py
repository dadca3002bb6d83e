"""Advantages of one rank's share of a rollout, from its rewards and log-probabilities, before training on it.

`Advantages` adds the columns `kl`, `advantages` and `returns`, and with a teacher `opd_reverse_kl`. The baseline of a
group is subtracted before (slime.rollout.train_data), and log-probs are columns already. What makes values of tokens
of a response's reward is in `RETURNS`, by the name that an estimator's row gives: pure functions over ragged lists of
tensors. A masked token (tool output, template) is not an action of the policy: it is skipped, as if its neighbours
followed each other, has the value 0 where an estimator goes token by token, and takes no part in discounting or
whitening.

Generalised advantage estimation (arXiv 1506.02438), with r_t and V_t of the trained tokens of one response, and 0
after the last:

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t = delta_t + gamma lambd A_(t+1)        the advantage of the policy
    R_t = A_t + V_t                            what the critic should have said
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.algorithms.estimators import ESTIMATORS, Estimator
from slime.algorithms.losses import compute_approx_kl, zero_masked
from slime.plugins import function_of
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import RolloutBatch

if TYPE_CHECKING:
    from slime.config.args import Args

Tensors = Sequence[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
VARIANCE_EPSILON = 1e-8


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
    token_rewards: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of the rewards of tokens (`get_token_rewards`).

    Tokens are the trained ones; a fully masked sample gets zeros.

    Args:
        rewards: [S].
        kl: per sample [R].
        loss_masks: per sample [R], 1 = trained.
        kl_coef: weight of the KL penalty.
        gamma: discount per trained token.
        token_rewards: per sample [R], of trained tokens beside the response's.

    Returns:
        Per sample [R], float32.
    """
    returns = get_token_rewards(rewards, kl, loss_masks, kl_coef, token_rewards)
    for of_sample, mask in zip(returns, loss_masks, strict=True):
        trained = mask.bool()
        of_sample[trained] = chunked_discounted_returns(of_sample[trained], gamma)
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


RETURNS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "broadcast": lambda rewards, kl, loss_masks, kl_coef, gamma: get_grpo_returns(rewards, kl),
    "discounted": get_reinforce_plus_plus_returns,
    "minus_kl": lambda rewards, kl, loss_masks, kl_coef, gamma: get_reinforce_plus_plus_baseline_advantages(
        rewards, kl, loss_masks, kl_coef
    ),
}
"""Name -> fn(rewards [S], kl [S][R], loss masks [S][R], kl_coef, gamma) -> return of each token [S][R], which is its
advantage too. Where a rollout has rewards of tokens, an estimator whose row says `process` gets `token_rewards`
[S][R], too. "gae" is not here: it needs the values of a critic (`get_advantages_and_returns_batch`)."""


# ---- generalised advantage estimation


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
    rewards: torch.Tensor,
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    kl_coef: float,
    token_rewards: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """r_t = -kl_coef * kl_t + the token's own, plus the response's reward on its last trained token; 0 if masked.

    Args:
        rewards: [S].
        kl: per sample [R].
        loss_masks: per sample [R], 1 = trained; the reward of a fully masked sample is nowhere.
        kl_coef: weight of the KL penalty.
        token_rewards: per sample [R], what trained tokens earned themselves (slime.rollout.hooks.process_rewards).

    Returns:
        Per sample [R], float32.
    """
    result = []
    for i, (reward, sample_kl, mask) in enumerate(zip(rewards, kl, loss_masks, strict=True)):
        trained = mask.bool().nonzero()[:, 0]
        of_sample = torch.zeros_like(sample_kl, dtype=torch.float32)
        of_sample[trained] = -kl_coef * sample_kl[trained].float()
        if token_rewards is not None:
            of_sample[trained] += token_rewards[i][trained].float()
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


# ---- whitening


def whiten(
    values: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """(x - mean) / sqrt(variance + 1e-8), mean and (unbiased) variance over the trained tokens of all ranks.

    Every rank of the group must call it, also one without a trained token. Sums are float64 and in two passes, so that
    values far from 0 lose nothing.

    Args:
        values: per sample [R].
        loss_masks: per sample [R], 1 = counts; masked tokens become 0.
        group: data-parallel x context-parallel ranks; None = this rank alone.

    Returns:
        Per sample [R], float32.
    """
    lengths = [len(value) for value in values]
    nothing = torch.zeros(0)  # of a rank without samples
    x, mask = torch.cat([*values] or [nothing]).double(), torch.cat([*loss_masks] or [nothing]).bool()
    x = torch.where(mask, x, 0)  # a masked token may hold anything
    count, total = _sum_over(torch.stack([mask.sum().double(), x.sum()]), group)
    centred = torch.where(mask, x - total / count.clamp(min=1), 0)
    (squares,) = _sum_over(centred.square().sum()[None], group)
    variance = squares / (count - 1).clamp(min=1)
    return list((centred * (variance + VARIANCE_EPSILON).rsqrt()).float().split(lengths))


def _sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


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
            ValueError: the custom function left a column out, there is no teacher's column, or the estimator does not
                use rewards of tokens, and there are some.
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
        of_tokens = {"token_rewards": data["token_rewards"]} if "token_rewards" in data else {}
        if of_tokens and not self.estimator.process:
            raise ValueError("the rollout has token_rewards, which this --advantage-estimator does not use")
        if not self.estimator.needs_critic:
            returns_fn = function_of(RETURNS, self.estimator.returns)
            data["returns"] = returns_fn(rewards, data["kl"], masks, self.kl_coef, self.gamma, **of_tokens)
            data["advantages"] = list(data["returns"])
            return
        data["advantages"], data["returns"] = get_advantages_and_returns_batch(
            data["total_lengths"],
            data["response_lengths"],
            data["values"],
            get_token_rewards(rewards, data["kl"], masks, self.kl_coef, **of_tokens),
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
