"""PF-PPO: which responses of a group are drawn, and that whole executions are, each as a rollout of its own."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from slime.rollout.train_data import filter_train_data, filtration_weights
from slime.utils.types import Sample
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


def drawn(rewards, groups, rollout_ids, *, seed=0, **changes):
    args = SimpleNamespace(**({"pf_ppo_reweight": "pow", "pf_ppo_weight_pow": 2.0, "rollout_seed": seed} | changes))
    count = len(rewards)
    data = {
        "raw_reward": rewards,
        "rollout_ids": rollout_ids,
        "sample_indices": list(range(count)),
        "rewards": [10 * reward for reward in rewards],
        "of_the_batch": "kept",
    }
    return filter_train_data(args, data, [Sample(group_index=group) for group in groups])


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, [1, 4, 9, 0]),
        ({"pf_ppo_weight_pow": 1.0}, [1, 2, 3, 0]),
        ({"pf_ppo_reweight": "max_min"}, [0, 1, 1, 0]),
        ({"pf_ppo_reweight": "max_random"}, [0.4, 1, 0.4, 0.4]),
    ],
)
def test_draws_follow_the_weights(changes, weights):
    rewards = [1.0, 2.0, -3.0, 0.0]
    counts, times = Counter(), 1500
    for seed in range(times):
        counts.update(drawn(rewards, [0] * 4, [5, 6, 7, 8], seed=seed, **changes)["sample_indices"])
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        assert counts[i] / (4 * times) == pytest.approx(share, abs=0.03)
        assert weight or not counts[i]


def test_groups_keep_their_size_and_executions_stay_whole():
    groups, rollouts = [0, 0, 0, 1, 1, 1], [4, 4, 5, 6, 7, 8]  # the first two samples are one execution
    for seed in range(30):
        data = drawn([1.0, 1.0, 2.0, 0.0, 1.0, 1.0], groups, rollouts, seed=seed)
        assert len(set(data["rollout_ids"])) == 2 + 3
        assert [i for i in data["sample_indices"] if i in (0, 1)] == [0, 1] * data["sample_indices"].count(0)
        assert data["rewards"] == [10 * reward for reward in data["raw_reward"]]
        assert data["of_the_batch"] == "kept"
    assert drawn([1.0, 2.0], [0, 0], [0, 1]) == drawn([1.0, 2.0], [0, 0], [0, 1]), "the seed decides"


def test_rewards_that_are_all_zero_are_drawn_alike():
    assert filtration_weights([0.0, 0.0], "pow", 2.0) == [1.0, 1.0]
    assert filtration_weights([0.0, 0.0], "pow", 0.0) == [1.0, 1.0]


def test_it_is_refused_where_it_has_no_effect(check: Check) -> None:
    sft = check("--loss-type sft_loss --pf-ppo-reweight pow").problems.wrong
    has(sft, "--pf-ppo-reweight has no effect with --loss-type sft_loss")
    assert check("--pf-ppo-reweight pow --pf-ppo-weight-pow 3").problems.wrong == []
