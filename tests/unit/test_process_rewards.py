"""Rewards of tokens and turns: from a sample to each token's advantage, by sums written out in the test."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from slime.algorithms.advantages import Advantages
from slime.algorithms.estimators import ESTIMATORS
from slime.observability.rollout_metrics import compute_metrics_from_samples
from slime.ray.rollout.shares import _convert, split_train_data
from slime.rollout.hooks.process_rewards import ABLE, process_problem, turn_spans
from slime.rollout.hooks.returns import check_trainable
from slime.rollout.hooks.sample_errors import SampleError
from slime.utils.train_data import flatten_columns, restore_columns
from slime.utils.types import Sample
from tests.unit import test_fsdp as backends
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.megatron_fakes import make_hf_model
from tests.unit.rollout_fakes import rollout_args

__all__ = ["check", "command_line"]  # fixtures


def sample(mask: list[int], index: int = 0, group: int = 0, **fields: Any) -> Sample:
    return Sample(
        tokens=[1, 2] + [3] * len(mask),
        response_length=len(mask),
        loss_mask=mask,
        index=index,
        group_index=group,
        reward=fields.pop("reward", 0.0),
        status=Sample.Status.COMPLETED,
        **fields,
    )


GROUP = [  # (mask, rewards of turns, reward); the last sample is alone
    sample([1, 1, 0, 1], 0, reward=1.0, turn_rewards=[2.0, -1.0]),
    sample([0, 1, 0, 0, 1, 0, 1, 1], 1, reward=0.0, turn_rewards=[0.5, None, 3.0]),
    sample([1, 1, 1], 2, reward=0.0, turn_rewards=[0.25]),
    sample([1, 0, 1], 3, group=1, reward=4.0, turn_rewards=[1.0, 1.0]),
]


def earned(estimator: str) -> list[list[float]]:
    """[S][R] each token's own reward: its turn's at the turn's end, for a baseline less that of all turns of the
    group."""
    kept = {0: [2.0, -1.0, 0.5, 3.0, 0.25], 1: [1.0, 1.0]}
    rows = []
    for one in GROUP:
        assert one.turn_rewards is not None and one.loss_mask is not None
        values, ends = [0.0] * len(one.loss_mask), []
        for place, trained in enumerate(one.loss_mask):
            if trained and (place + 1 == len(one.loss_mask) or not one.loss_mask[place + 1]):
                ends.append(place)
        mean, std = statistics.mean(kept[one.group_index or 0]), statistics.stdev(kept[one.group_index or 0])
        for end, reward in zip(ends, one.turn_rewards, strict=True):
            if reward is not None:
                values[end] = (reward - mean) / (std + 1e-6) if estimator == "turn_grpo" else reward
        rows.append(values)
    return rows


def outcomes(estimator: str) -> list[float]:
    if estimator != "turn_grpo":
        return [1.0, 0.0, 0.0, 4.0]
    mean, std = statistics.mean([1.0, 0.0, 0.0]), statistics.stdev([1.0, 0.0, 0.0])
    return [(reward - mean) / (std + 1e-6) for reward in (1.0, 0.0, 0.0)] + [0.0]


def by_definition(estimator: str, gamma: float, lambd: float, values: list[list[float]]) -> list[list[float]]:
    """A_t as the sum over all later trained tokens: of rewards, or with a critic of its errors delta."""
    result = []
    for one, own, outcome, of_critic in zip(GROUP, earned(estimator), outcomes(estimator), values, strict=True):
        places = [place for place, trained in enumerate(one.loss_mask or []) if trained]
        rewards = [own[place] for place in places]
        rewards[-1] += outcome
        factor = gamma
        if estimator == "ppo":
            v = [of_critic[place] for place in places] + [0.0]
            rewards = [r + gamma * v[k + 1] - v[k] for k, r in enumerate(rewards)]
            factor = gamma * lambd
        row = [0.0] * one.response_length
        for k, place in enumerate(places):
            row[place] = math.fsum(factor ** (j - k) * rewards[j] for j in range(k, len(places)))
        result.append(row)
    return result


@pytest.mark.parametrize("estimator", [name for name, row in ESTIMATORS.items() if row.process])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8)])
def test_the_advantage_of_each_token_is_the_sum_of_what_follows_it(estimator: str, gamma: float, lambd: float) -> None:
    args = rollout_args(advantage_estimator=estimator, gamma=gamma, lambd=lambd, global_batch_size=2)
    args.use_critic = estimator == "ppo"
    data = _convert(args, GROUP)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(one.response_length, generator=generator) for one in GROUP]
    expected = by_definition(estimator, gamma, lambd, [row.tolist() for row in values])
    layout = {"dp_size": 2, "cp_size": 1, "dp_rank": 0}
    args.use_dynamic_batch_size, args.max_tokens_per_gpu = True, 24
    found: dict[int, list[float]] = {}
    for share in split_train_data(args, data, layout):  # as each rank gets it
        share = restore_columns(flatten_columns(share))
        masks = [torch.as_tensor(np.array(mask)) for mask in share["loss_masks"]]
        columns: Any = share | {
            "loss_masks": masks,
            "values": [values[i] for i in share["partition"]],
            "token_rewards": [torch.as_tensor(np.array(row)) for row in share["token_rewards"]],
        }
        Advantages.of(args)(columns, None)
        found |= dict(zip(share["partition"], (row.tolist() for row in columns["advantages"]), strict=True))
    assert sorted(found) == [0, 1, 2, 3]
    for position, row in enumerate(expected):
        assert found[position] == pytest.approx(row, rel=1e-4, abs=1e-5)


def test_a_reward_at_a_masked_token_counts_where_the_policy_last_wrote() -> None:
    args = rollout_args(advantage_estimator="reinforce_plus_plus")
    rewards = [5.0, None, 1.0, 2.0, 4.0]  # before the first trained token nothing is earned
    one = sample([0, 1, 0, 0, 1], token_rewards=rewards)
    removed = sample([0, 1, 0, 0, 1], 1, token_rewards=rewards, remove_sample=True)
    assert _convert(args, [one, removed])["token_rewards"] == [[0.0, 3.0, 0.0, 0.0, 4.0], [0.0] * 5]


def test_an_untrusted_sample_is_in_no_mean_of_turns() -> None:
    args = rollout_args(advantage_estimator="turn_grpo", grpo_std_normalization=False)
    lost = sample([1, 1], 1, turn_rewards=[1e6], reward_is_trusted=False)
    group = [sample([1, 0, 1], 0, turn_rewards=[1.0, 2.0]), lost, sample([1], 2)]
    assert _convert(args, group)["token_rewards"] == [[-0.5, 0.0, 0.5], [0.0, 0.0], [0.0]]
    args.rewards_normalization = False
    assert _convert(args, group)["token_rewards"] == [[1.0, 0.0, 2.0], [0.0, 0.0], [0.0]]
    equal = [sample([1], i, turn_rewards=[0.1]) for i in range(3)]
    args.rewards_normalization = args.grpo_std_normalization = True
    assert _convert(args, equal)["token_rewards"] == [[0.0]] * 3, "equal rewards teach exactly nothing"


@pytest.mark.parametrize(
    ("estimator", "fields", "problem"),
    [
        ("ppo", {"token_rewards": [1.0]}, "1 token_rewards for 3 response tokens; they must be equal"),
        ("turn_grpo", {"turn_rewards": [1.0, 2.0, 3.0]}, "3 turn_rewards for 2 turns; they must be equal"),
        ("turn_grpo", {"turn_rewards": [1.0, math.nan]}, "nan in turn_rewards at 1; an entry is a finite number or"),
        ("ppo", {"token_rewards": [0, 0, 0], "turn_rewards": [1, 1]}, "token_rewards and turn_rewards; set one of"),
        ("grpo", {"turn_rewards": [1.0, 2.0]}, f"--advantage-estimator grpo does not use; choose {ABLE}"),
    ],
)
def test_a_sample_whose_rewards_do_not_fit_is_named(estimator: str, fields: dict[str, Any], problem: str) -> None:
    args = rollout_args(advantage_estimator=estimator)
    with pytest.raises(SampleError, match="sample 7") as caught:
        check_trainable(args, "the rollout", [sample([1, 0, 1], 7, **fields)])
    assert problem in str(caught.value)


def test_rewards_of_tokens_grow_with_the_response_and_survive_a_checkpoint() -> None:
    one = Sample(tokens=[1], token_rewards=[])
    one.append_response_tokens(tokens=[4, 5], log_probs=[-1.0, -2.0])
    one.token_rewards = [None, 1.5]
    one.append_response_tokens(tokens=[6], trainable=False)
    assert one.token_rewards == [None, 1.5, None]
    assert Sample.from_dict(one.to_dict()).token_rewards == one.token_rewards
    assert turn_spans(one) == [(0, 2)]
    assert process_problem(rollout_args(advantage_estimator="ppo"), one) is None


# ---- through the trainers


def rewarded(data: dict[str, Any]) -> dict[str, Any]:
    rows = [[((i + 1) * (t + 2)) % 5 - 1.5 for t in range(n)] for i, n in enumerate(data["response_lengths"])]
    return {**data, "token_rewards": rows}


def test_both_backends_train_on_rewards_of_tokens_whatever_the_layout(tmp_path: Path) -> None:
    import slime.backends.fsdp_utils.actor  # noqa: F401  (once, before worlds fork)

    hf = tmp_path / "qwen3"
    make_hf_model(hf, "qwen3")
    (hf / "tokenizer_config.json").write_text("{}")
    plain = backends.make_train_data()
    with mock.patch.object(backends, "make_train_data", lambda: rewarded(plain)):
        flags: dict[str, Any] = {"advantage_estimator": "turn_grpo", "num_steps": 1}
        parallel = {"world": 2, "megatron": "--context-parallel-size 2", "max_tokens_per_gpu": 24}
        backends.run(hf, out=tmp_path / "fsdp.pt", **parallel, **flags)
        backends.run(hf, backend="megatron", out=tmp_path / "cp.pt", **parallel, **flags)
    backends.assert_equal_runs(tmp_path / "cp.pt", tmp_path / "fsdp.pt")
    records = torch.load(tmp_path / "cp.pt")[0]
    measured = next(metrics["rollout/advantages"] for metrics, _ in records if "rollout/advantages" in metrics)
    assert measured == pytest.approx(mean_return(rewarded(plain)), rel=1e-4)


def mean_return(data: dict[str, Any]) -> float:
    """Mean over samples of the mean over their trained tokens of the sum of what follows."""
    means = []
    for mask, own, reward in zip(data["loss_masks"], data["token_rewards"], data["rewards"], strict=True):
        kept = [value for value, trained in zip(own, mask, strict=True) if trained]
        sums = [math.fsum(kept[k:]) + reward for k in range(len(kept))]
        means.append(statistics.mean(sums) if sums else 0.0)
    return statistics.mean(means)


# ---- flags, hooks, parts


async def rate(args: Any, one: Sample) -> list[float]:
    return [1.0] * one.response_length


def test_flags_of_process_rewards(check: Check) -> None:
    hook = "--process-reward-path slime.rollout.rm_hub.service:score_turns"
    has(check(hook).problems.wrong, "--advantage-estimator grpo does not use rewards of tokens or turns; choose")
    served = f"{hook} --advantage-estimator turn_grpo"
    has(check(served).problems.wrong, "score_turns needs --reward-model-path, the model that it asks.")
    own = f"--process-reward-path {__file__}:rate --advantage-estimator turn_grpo"  # async
    assert not check(own).problems.all()
    alone = check("--advantage-estimator turn_grpo").problems
    has(alone.wrong, "--advantage-estimator turn_grpo has no effect where no sample has rewards of turns")
    has(check("--reward-key correct=1,format").problems.wrong, "--reward-key correct=1,format: several parts are")
    has(check("--reward-key a=0,b=0").problems.wrong, "--reward-key a=0,b=0: the weights of all parts are 0.")


def test_several_parts_of_a_reward_are_summed_by_weight_and_logged_apart() -> None:
    args = rollout_args(reward_key="correct=1,format=0.5")
    samples = [sample([1], i, reward={"correct": float(i), "format": 1.0, "said": "x"}) for i in range(2)]
    data = _convert(args, samples)
    assert data["raw_reward"] == [0.5, 1.5]
    metrics = compute_metrics_from_samples(args, samples)
    assert (metrics["reward_part/correct"], metrics["reward_part/format"]) == (0.5, 1.0)
    assert Sample.reward_of(args, 3.0) == {"correct": 3.0, "format": 0.0}
    with pytest.raises(SampleError, match=r"sample 5 .*which has no 'format' \(--reward-key\)"):
        check_trainable(args, "the rollout", [sample([1], 5, reward={"correct": 1.0})])
    with pytest.raises(SampleError, match="returned 'x'"):
        check_trainable(args, "the rollout", [sample([1], 5, reward={"correct": 1.0, "format": "x"})])


def test_what_turns_earned_is_logged_as_it_was_given() -> None:
    metrics = compute_metrics_from_samples(rollout_args(advantage_estimator="turn_grpo"), GROUP)
    assert metrics["process_reward"] == pytest.approx((1.0 + 3.5 + 0.25 + 2.0) / 4)
