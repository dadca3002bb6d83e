"""GAE against a reference of plain float64 Python, and the advantages that PPO makes of a rollout with it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.advantages import (
    RETURNS,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_token_rewards,
    vanilla_gae,
)
from slime.backends.megatron_utils import loss as losses

MASKS = [[1, 0, 1, 1, 0], [1], [0, 0], [0, 1, 1, 0], [1] * 300]
REWARDS = [2.0, -1e4, 7.0, 1e4, 0.5]
LENGTHS = [len(mask) for mask in MASKS]
FAR = 1e6
"""Rewards, values and KL of masked tokens, which must not show anywhere."""


def reference(rewards, values, mask, gamma, lambd):
    """(advantages, returns) of one response: the definition of the paper, over its trained tokens."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    advantage = following = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            advantage = rewards[t] + gamma * following - values[t] + gamma * lambd * advantage
            following = values[t]
            advantages[t], returns[t] = advantage, advantage + values[t]
    return advantages, returns


def world(masks, scale=1.0, seed=0):
    """Random values and KL [S][R], far ones on masked tokens."""
    rng = random.Random(seed)
    return tuple([[rng.gauss(0, scale) if m else FAR for m in mask] for mask in masks] for _ in range(2))


def token_rewards(masks, rewards, kl, kl_coef):
    result = []
    for mask, reward, row in zip(masks, rewards, kl, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=None)
        result.append(
            [-kl_coef * k * m + reward * (t == last) for t, (k, m) in enumerate(zip(row, mask, strict=True))]
        )
    return result


def tensors(rows):
    return [torch.tensor(row) for row in rows]


def totals(lengths):
    return [length + 3 for length in lengths]


def close(found, expected, scale):
    for row, numbers in zip(found, expected, strict=True):
        assert row.dtype == torch.float32
        assert row.tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-6 * scale)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (1.0, 0.0), (0.0, 1.0)])
def test_advantages_and_returns_are_those_of_the_definition_over_the_trained_tokens(gamma, lambd, chunked):
    values, kl = world(MASKS)
    rewards = get_token_rewards(torch.tensor(REWARDS), tensors(kl), tensors(MASKS), 0.1)
    expected_rewards = token_rewards(MASKS, REWARDS, kl, 0.1)
    for row, numbers in zip(rewards, expected_rewards, strict=True):
        assert row.tolist() == pytest.approx(numbers, rel=1e-6)
    found = get_advantages_and_returns_batch(
        totals(LENGTHS), LENGTHS, tensors(values), rewards, gamma, lambd, chunked, loss_masks=tensors(MASKS)
    )
    pairs = zip(expected_rewards, values, MASKS, strict=True)
    expected = [reference(*sample, gamma, lambd) for sample in pairs]
    for columns, numbers in zip(found, zip(*expected, strict=True), strict=True):
        close(columns, numbers, scale=1e4)
    assert found[0][2].tolist() == found[1][2].tolist() == [0.0, 0.0], "nothing of a fully masked sample is trained"


def test_the_reward_is_on_the_last_trained_token_and_no_masked_one_is_between_its_neighbours():
    mask, values = torch.tensor([1, 0, 0, 1, 0]), torch.tensor([0.5, FAR, FAR, 2.0, FAR])
    (rewards,) = get_token_rewards(torch.tensor([3.0]), [torch.zeros(5)], [mask], 1.0)
    assert rewards.tolist() == [0, 0, 0, 3, 0]
    (advantages,), (returns,) = get_advantages_and_returns_batch(
        [9], [5], [values], [rewards], 0.5, 0.5, loss_masks=[mask]
    )
    last = 3.0 - 2.0
    first = 0.5 * 2.0 - 0.5 + 0.25 * last  # one step before it, although three tokens lie between
    assert advantages.tolist() == [first, 0, 0, last, 0]
    assert returns.tolist() == [first + 0.5, 0, 0, 3.0, 0]


def test_without_a_critics_opinion_and_lambda_1_the_returns_are_those_of_reinforce_plus_plus():
    _, kl = world(MASKS)
    rewards, masks = torch.tensor(REWARDS), tensors(MASKS)
    zeros = [torch.zeros(length) for length in LENGTHS]
    found = get_advantages_and_returns_batch(
        totals(LENGTHS),
        LENGTHS,
        zeros,
        get_token_rewards(rewards, tensors(kl), masks, 0.3),
        0.9,
        1.0,
        loss_masks=masks,
    )
    expected = RETURNS["discounted"](rewards, tensors(kl), masks, 0.3, 0.9)
    for columns in found:
        close(columns, [row.tolist() for row in expected], scale=1e4)


@pytest.mark.parametrize("gae", [vanilla_gae, chunked_gae])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 400])
def test_long_responses_far_rewards_and_batches_of_any_shape(gae, length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = (1e4 * torch.randn(2, 3, length, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages, returns = gae(rewards, values, 0.99, 0.95)
    assert advantages.shape == returns.shape == (2, 3, length)
    for at in [(0, 0), (1, 2)]:
        expected = reference(rewards[at].tolist(), values[at].tolist(), [1] * length, 0.99, 0.95)
        assert advantages[at].tolist() == pytest.approx(expected[0], rel=1e-9)
        assert returns[at].tolist() == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.99, 0.95), (0.999, 0.99), (0.9999, 1.0)])
def test_chunks_of_the_longest_responses_agree_with_the_plain_loop(gamma, lambd):
    length = 131_072
    rewards, values = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    advantages, returns = chunked_gae(rewards, values, gamma, lambd)
    assert advantages.dtype == returns.dtype == torch.float32
    expected = reference(rewards.tolist(), values.tolist(), [1] * length, gamma, lambd)
    for found, exact in zip((advantages, returns), expected, strict=True):
        assert float((found.double() - torch.tensor(exact, dtype=torch.float64)).abs().max()) < 1e-5


def test_chunks_change_nothing():
    rewards, values = torch.randn(2, 301, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for size in (1, 7, 1000):
        for a, b in zip(
            chunked_gae(rewards, values, 0.9, 0.8, size), vanilla_gae(rewards, values, 0.9, 0.8), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_lengths_that_do_not_match_are_named():
    with pytest.raises(
        ValueError, match=r"a response of 2 tokens in a sample of 5 has \[3, 2, 2\] values, rewards and"
    ):
        get_advantages_and_returns_batch([5], [2], [torch.zeros(3)], [torch.zeros(2)], 1.0, 1.0)


def make_args(**changes):
    values = {
        "advantage_estimator": "ppo",
        "custom_advantage_function_path": None,
        "gamma": 0.9,
        "kl_coef": 0.1,
        "kl_loss_type": "k1",
        "lambd": 0.8,
        "normalize_advantages": False,
        "use_opd": False,
    }
    return SimpleNamespace(**(values | changes))


def make_data():
    values, log_probs = world(MASKS)
    _, reference_log_probs = world(MASKS, seed=1)
    return {
        "loss_masks": tensors(MASKS),
        "log_probs": tensors(log_probs),
        "ref_log_probs": tensors(reference_log_probs),
        "response_lengths": LENGTHS,
        "rewards": REWARDS,
        "total_lengths": totals(LENGTHS),
        "values": tensors(values),
    }


def test_ppo_takes_the_kl_of_each_token_into_its_rewards_and_leaves_the_returns_as_they_are_when_it_whitens():
    data = make_data()
    losses.compute_advantages_and_returns(make_args(), data)
    both = zip(data["log_probs"], data["ref_log_probs"], strict=True)
    kl = [(mine - reference).tolist() for mine, reference in both]
    rewards = token_rewards(MASKS, REWARDS, kl, 0.1)
    values = [row.tolist() for row in data["values"]]
    expected = [reference(*sample, 0.9, 0.8) for sample in zip(rewards, values, MASKS, strict=True)]
    close(data["advantages"], [advantages for advantages, _ in expected], scale=1e4)
    close(data["returns"], [returns for _, returns in expected], scale=1e4)

    whitened = make_data()
    losses.compute_advantages_and_returns(make_args(normalize_advantages=True), whitened)
    trained = torch.cat(whitened["advantages"])[torch.cat(whitened["loss_masks"]).bool()]
    assert trained.mean().item() == pytest.approx(0, abs=1e-5) and trained.std().item() == pytest.approx(1, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(whitened["returns"], data["returns"], strict=True))


@pytest.mark.parametrize("change", [{"lambd": 1.0}, {"gamma": 1.0}, {"kl_coef": 0.0}])
def test_each_parameter_of_the_estimate_changes_it(change):
    data, other = make_data(), make_data()
    losses.compute_advantages_and_returns(make_args(), data)
    losses.compute_advantages_and_returns(make_args(**change), other)
    assert not torch.equal(data["advantages"][0], other["advantages"][0])
