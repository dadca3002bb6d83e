"""KL estimators, the clipped loss and GRPO returns: the contract's numbers, each derived here."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.advantages import RETURNS
from slime.algorithms.estimators import ESTIMATORS
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss, get_grpo_returns


def test_the_contracts_clipping_example():
    old, new = torch.tensor([-1.2, -0.5, -1.0]), torch.tensor([-1.0, -0.5, -2.0])
    advantages = torch.tensor([1.0, -1.0, -1.0])
    loss, clipfrac = compute_policy_loss(old - new, advantages, 0.2, 0.28)
    # ratios e^0.2 (inside 1.28), 1, e^-1 (below 0.8: with A = -1 the clip's 0.8 is the larger loss)
    torch.testing.assert_close(loss, torch.tensor([-math.exp(0.2), 1.0, 0.8]))
    assert clipfrac.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(3.0, 1.0, -1.28), (0.1, 1.0, -0.1), (3.0, -1.0, 3.0)])
def test_a_clip_binds_only_against_the_direction_of_the_advantage(ratio, advantage, expected):
    loss, _ = compute_policy_loss(torch.tensor([-math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.28)
    assert loss.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_that_of_the_ratio():
    ppo_kl = torch.tensor([-math.log(2.0), 0.0], requires_grad=True)
    compute_policy_loss(ppo_kl, torch.ones(2), 0.2, 0.2)[0].sum().backward()
    assert ppo_kl.grad.tolist() == [0.0, 1.0]


def test_dual_clip_bounds_negative_advantages_only():
    ppo_kl = torch.tensor([-math.log(10.0), -math.log(10.0)])
    loss, clipfrac = compute_policy_loss(ppo_kl, torch.tensor([-1.0, 1.0]), 0.2, 0.2, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.2]))
    assert clipfrac.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="--eps-clip-c"):
        compute_policy_loss(ppo_kl, ppo_kl, 0.2, 0.2, 1.0)


def test_kl_estimators_of_the_contracts_differences():
    base = torch.zeros(3)
    diff = torch.tensor([0.2, 0.0, -1.0])
    torch.testing.assert_close(compute_approx_kl(diff, base, "k1"), diff)
    torch.testing.assert_close(compute_approx_kl(diff, base, "k2"), torch.tensor([0.02, 0.0, 0.5]))
    k3 = torch.tensor([math.exp(-d) - 1 + d for d in (0.2, 0.0, -1.0)])
    torch.testing.assert_close(compute_approx_kl(diff, base, "k3"), k3)
    torch.testing.assert_close(compute_approx_kl(diff, base, "low_var_kl"), k3)
    far = torch.tensor([-5.0])
    assert compute_approx_kl(far, torch.zeros(1), "low_var_kl").item() == 10.0
    assert compute_approx_kl(far, torch.zeros(1), "k3").item() == pytest.approx(math.exp(5) - 6, rel=1e-6)
    with pytest.raises(ValueError, match="--kl-loss-type"):
        compute_approx_kl(diff, base, "k4")


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_estimators_agree_near_zero_and_are_never_negative(kind):
    diff = torch.linspace(-0.01, 0.01, 9)
    kl = compute_approx_kl(diff, torch.zeros(9), kind)
    assert (kl >= 0).all()
    torch.testing.assert_close(kl, diff.square() / 2, rtol=0.01, atol=1e-9)


def test_grpo_gives_every_token_of_a_response_its_reward():
    returns = get_grpo_returns(torch.tensor([0.5, -1.5]), [torch.zeros(3), torch.zeros(1)])
    assert [r.tolist() for r in returns] == [[0.5] * 3, [-1.5]]
    kl = [torch.zeros(3), torch.zeros(1)]
    of_row = RETURNS[ESTIMATORS["grpo"].returns](torch.tensor([0.5, -1.5]), kl, kl, 0.0, 1.0)
    assert [r.tolist() for r in of_row] == [[0.5] * 3, [-1.5]]
