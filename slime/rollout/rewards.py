"""From scored samples to the rewards that advantages are made of: the baseline of each group is subtracted.

Which baseline is the estimator's (slime.algorithms.estimators). Departs from upstream in three points:
groups are always those of `group_index` (never guessed from counts), a fan-out rollout (several samples that share a
`rollout_id`) counts once in its group's mean and deviation, and with --overlong-buffer-len a penalty for long
responses is added first. It scores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.algorithms.baselines import BASELINES, GREEDY_REWARD, Baseline, group_mean
from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args
from slime.rollout.hook_errors import blame_hook, hook_name
from slime.rollout.hook_returns import check_rewards
from slime.utils.misc import group_by, hook_args, is_finite_number, load_function, shown
from slime.utils.names import function_of
from slime.utils.overlong import overlong_penalties
from slime.utils.types import Sample

_STD_EPSILON = 1e-6


def post_process_rewards(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards for training) of a flat list of samples; a custom post-process replaces the default.

    Args:
        args: reads `custom_reward_post_process_path`, `reward_key`, `advantage_estimator`, `rewards_normalization`,
            `grpo_std_normalization`, `overlong_buffer_len`, `overlong_penalty_factor`, `rollout_max_response_len`.
        samples: every sample of the rollout, scored.

    Raises:
        ValueError: a sample has no reward.
        HookReturnError: the custom function returned no pair of lists of numbers.
    """
    if args.custom_reward_post_process_path:
        path = args.custom_reward_post_process_path
        with blame_hook(f"--custom-reward-post-process-path {hook_name(path)}"):
            returned = load_function(path)(hook_args(args), samples)
        return check_rewards(path, returned, len(samples))
    raw = [raw_reward(args, sample) for sample in samples]
    rewards = [reward + penalty for reward, penalty in zip(raw, overlong_penalties(args, samples), strict=True)]
    estimator = ESTIMATORS[args.advantage_estimator]
    if not args.rewards_normalization or estimator.baseline is None:
        return raw, rewards
    if estimator.baseline == "greedy":
        return raw, [reward - _greedy_reward(sample) for sample, reward in zip(samples, rewards, strict=True)]
    divide = estimator.divides_by_std and args.grpo_std_normalization
    baseline_fn = function_of(BASELINES, estimator.baseline)
    return raw, normalize_by_group(samples, rewards, divide_by_std=divide, baseline_fn=baseline_fn)


def _greedy_reward(sample: Sample) -> float:
    if GREEDY_REWARD not in sample.metadata:
        raise ValueError(
            f"sample {sample.index} has no metadata[{GREEDY_REWARD!r}], which --advantage-estimator remax subtracts; "
            "slime's own rollout functions put it there, another --rollout-function-path has to"
        )
    return float(sample.metadata[GREEDY_REWARD])


def raw_reward(args: Args, sample: Sample) -> float:
    """A sample's reward as a number.

    Raises:
        ValueError: it has none, or a dict without --reward-key, or something else that is no finite number.
    """
    value = sample.get_reward_value(args)
    if not is_finite_number(value):
        found = "no reward" if value is None else f"the reward {shown(value)}"
        remedy = "; name its number with --reward-key" if isinstance(value, dict) else ""
        raise ValueError(f"sample {sample.index} (status {sample.status.value}) has {found}{remedy}")
    return float(value)


def normalize_by_group(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    *,
    divide_by_std: bool,
    baseline_fn: Baseline = group_mean,
) -> list[float]:
    """Rewards minus their group's baseline and, if asked, divided by its deviation (unbiased) + 1e-6.

    A group of one execution becomes 0. A sample without a `group_index` is a group of its own.

    Args:
        samples: their `group_index`, `rollout_id` and trained tokens are read.
        rewards: [S].
        divide_by_std: also divide.
        baseline_fn: (rewards, trained tokens) of a group's executions -> the baseline of each.
    """
    normalized = [0.0] * len(samples)
    positions = range(len(samples))

    def group_of(i: int) -> tuple[str, int]:
        index = samples[i].group_index
        return ("group", index) if index is not None else ("alone", i)

    def execution_of(i: int) -> tuple[str, int]:
        rollout_id = samples[i].rollout_id
        return ("rollout", rollout_id) if rollout_id is not None else ("sample", i)

    for members in group_by(positions, group_of).values():
        executions = list(group_by(members, execution_of).values())
        values = [math.fsum(rewards[i] for i in execution) / len(execution) for execution in executions]
        lengths = [sum(samples[i].effective_response_length for i in execution) for execution in executions]
        scale = _unbiased_std(values) + _STD_EPSILON if divide_by_std else 1.0
        for execution, baseline in zip(executions, baseline_fn(values, lengths), strict=True):
            for i in execution:
                normalized[i] = (rewards[i] - baseline) / scale
    return normalized


def _unbiased_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
