"""PF-PPO: train on responses drawn again by reward, so that unreliable middling rewards count less.

Policy Filtration (Shen and Zhang 2024, arXiv 2409.06957). After advantages are made from all responses, as many
executions as a group has are drawn from it with replacement, so that batch sizes stay. It knows nothing about where
rewards come from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.args import Args
from slime.utils.misc import group_by, needed
from slime.utils.types import Sample

MAX_RANDOM_WEIGHT = 0.4
"""Weight of a response that is not the best, for max_random."""


def filtration_weights(rewards: Sequence[float], kind: str, weight_pow: float) -> list[float]:
    """How likely each response of a group is drawn, not normalised.

    pow: |r|^weight_pow; max_min: 1 for the best and the worst, 0 for the rest; max_random: 1 for the best, 0.4 for the
    rest. All equal where every weight would be 0.

    Example:
        >>> filtration_weights([0.0, 2.0, -3.0], "pow", 2.0)
        [0.0, 4.0, 9.0]
    """
    best, worst = max(rewards), min(rewards)
    if kind == "pow":
        largest = max(abs(reward) for reward in rewards)
        weights = [abs(reward) ** weight_pow if largest else 0.0 for reward in rewards]
    elif kind == "max_min":
        weights = [float(reward in (best, worst)) for reward in rewards]
    else:
        weights = [1.0 if reward == best else MAX_RANDOM_WEIGHT for reward in rewards]
    return weights if any(weights) else [1.0] * len(weights)


def filter_train_data(args: Args, data: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns of the executions that were drawn; each draw is a rollout of its own.

    Args:
        args: `pf_ppo_reweight`, `pf_ppo_weight_pow`, `rollout_seed`, from which the draws follow.
        data: TrainData of `samples`, with `raw_reward` and `rollout_ids`.
        samples: their `group_index` is read; a sample without one stays.
    """
    draws = random.Random(f"{args.rollout_seed} {data['sample_indices']}")
    owners = [("alone", i) if s.group_index is None else ("group", s.group_index) for i, s in enumerate(samples)]
    picked: list[list[int]] = []
    for members in group_by(range(len(samples)), lambda i: owners[i]).values():
        executions = list(group_by(members, lambda i: data["rollout_ids"][i]).values())
        rewards = [sum(data["raw_reward"][i] for i in one) / len(one) for one in executions]
        weights = filtration_weights(rewards, needed(args.pf_ppo_reweight), args.pf_ppo_weight_pow)
        picked += draws.choices(executions, weights, k=len(executions))
    order = [i for execution in picked for i in execution]
    columns = {
        name: [values[i] for i in order] if isinstance(values, list) and len(values) == len(samples) else values
        for name, values in data.items()
    }
    columns["rollout_ids"] = [number for number, execution in enumerate(picked) for _ in execution]
    return columns
