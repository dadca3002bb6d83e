"""The policy loss of every estimator, metric by metric and with its gradient, against plain float64 Python."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.losses import compute_cispo_loss
from tests.training.algorithms.loss_world import (
    GAP,
    MASKS,
    REWARDS,
    advantages_of,
    aggregate,
    log_ratios,
    make_args,
    make_world,
    reference_pg_loss,
    rows,
    run,
)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_the_policy_loss_is_the_references(estimator, per_token, seed):
    logits, columns, tokens = make_world(seed)
    args = make_args(advantage_estimator=estimator, calculate_per_token_loss=per_token, kl_coef=0.1, gamma=0.9)
    _, metrics, data = run(args, logits, columns, tokens)
    mode = "token-mean" if per_token else "seq-mean-token-mean"
    expected = reference_pg_loss(estimator, columns, advantages_of(data), mode)
    assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)
    ratios = log_ratios(estimator, columns["new"], columns["old"])
    kl = aggregate(mode, rows(lambda ratio: -ratio, ratios))
    assert metrics["ppo_kl"] == pytest.approx(kl, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_is_that_of_the_reference(estimator):
    """Along a random direction of the logits, by central differences of the reference in float64."""
    logits, columns, tokens = make_world(4)
    args = make_args(advantage_estimator=estimator)
    gradient, _, data = run(args, logits, columns, tokens, rewards=[1.5, -2.0, 3.0, -0.75])
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))

    def at(step):
        log_p = (logits[0].double() + step * direction[0].double()).log_softmax(-1)
        new, start = [], 0
        for sample, mask in zip(tokens, MASKS, strict=True):
            span = range(start + 1, start + 1 + len(mask))
            new.append([log_p[row, sample[row - start + 1]].item() for row in span])
            start += len(sample)
        if estimator != "cispo":
            return reference_pg_loss(estimator, columns | {"new": new}, advantages_of(data))
        weights = rows(lambda a, b: min(max(math.exp(a - b), 0.8), 1.28), columns["new"], columns["old"])
        return aggregate("seq-mean-token-mean", rows(lambda w, a, lp: -w * a * lp, weights, advantages_of(data), new))

    expected = (at(1e-6) - at(-1e-6)) / 2e-6 / 3  # the mean over three rollouts
    assert (gradient.double() * direction).sum().item() == pytest.approx(expected, rel=1e-3)


def test_clipping_decides_some_of_these_tokens_and_sequences_differ_from_tokens():
    """What makes the two tests above fail when a clip or a ratio is left out."""
    logits, columns, tokens = make_world(0)
    assert max(GAP.values()) > math.log(1.28)
    found = {name: run(make_args(advantage_estimator=name), logits, columns, tokens)[1] for name in ESTIMATORS}
    assert found["grpo"]["pg_clipfrac"] > 0 and found["cispo"]["pg_clipfrac"] > 0
    assert len({found[name]["pg_loss"] for name in ("grpo", "gspo", "cispo")}) == 3


@pytest.mark.parametrize("bound", [None, 1.05])
def test_a_dual_clip_bounds_the_loss_of_bad_tokens_alone_and_clipped_tokens_are_counted(bound):
    found, decided = [], 0
    for seed in range(4):
        logits, columns, tokens = make_world(seed)
        _, metrics, data = run(make_args(eps_clip_c=bound), logits, columns, tokens)
        ratios = rows(math.exp, log_ratios("grpo", columns["new"], columns["old"]))
        advantages = advantages_of(data)
        usual = rows(lambda r, a: max(-r * a, -min(max(r, 0.8), 1.28) * a), ratios, advantages)
        losses = usual
        if bound is not None:
            losses = rows(lambda x, a: min(x, -bound * a) if a < 0 else x, usual, advantages)
            decided += losses != usual
        is_clipped = rows(lambda r, a: float(-min(max(r, 0.8), 1.28) * a > -r * a), ratios, advantages)
        assert metrics["pg_loss"] == pytest.approx(aggregate("seq-mean-token-mean", losses), rel=1e-5)
        assert metrics["pg_clipfrac"] == pytest.approx(aggregate("seq-mean-token-mean", is_clipped), rel=1e-5)
        found += [x for row in is_clipped for x in row]
    assert {0.0, 1.0} == set(found) and (bound is None or decided)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_fully_masked_sample_teaches_nothing_whatever_its_reward(estimator):
    logits, columns, tokens = make_world(1)
    args = make_args(advantage_estimator=estimator, kl_coef=0.1)
    assert not any(MASKS[2])
    first, metrics, _ = run(args, logits, columns, tokens)
    start = len(tokens[0]) + len(tokens[1])
    assert not first[0, start : start + len(tokens[2])].any()
    changed = [*REWARDS[:2], -1e4, REWARDS[3]]
    second, again, _ = run(args, logits, columns, tokens, rewards=changed)
    assert torch.equal(first, second) and metrics == again
    assert torch.isfinite(first).all()


def test_whitened_advantages_reach_the_loss():
    logits, columns, tokens = make_world(2)
    args = make_args(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, kl_coef=0.1)
    _, metrics, data = run(args, logits, columns, tokens)
    kept = [
        a for row, mask in zip(data["advantages"], MASKS, strict=True) for a in row[torch.tensor(mask) > 0].tolist()
    ]
    assert math.fsum(kept) == pytest.approx(0, abs=1e-5)
    assert math.fsum(a * a for a in kept) / (len(kept) - 1) == pytest.approx(1, rel=1e-5)
    expected = reference_pg_loss("reinforce_plus_plus", columns, advantages_of(data))
    assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_discount_makes_early_tokens_worth_less():
    logits, columns, tokens = make_world(2)
    args = make_args(advantage_estimator="reinforce_plus_plus", gamma=0.5)
    _, _, data = run(args, logits, columns, tokens)
    # the masked token of the first sample costs no discount
    assert MASKS[0] == [1, 0, 1, 1]
    assert data["advantages"][0].tolist() == [1.5 / 4, 0.0, 1.5 / 2, 1.5]


def test_the_contracts_cispo_example():
    old, new = torch.tensor([-1.2, -0.5, -1.0]), torch.tensor([-1.0, -0.5, -2.0])
    advantages = torch.tensor([1.0, -1.0, -1.0])
    loss, clipfrac = compute_cispo_loss(old - new, new, advantages, 1.0, 4.0)
    torch.testing.assert_close(loss, torch.tensor([math.exp(0.2), -0.5, -2 * math.exp(-1)]))
    assert clipfrac.tolist() == [0.0, 0.0, 0.0]
