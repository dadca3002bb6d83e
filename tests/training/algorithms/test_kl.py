"""KL types with and without importance ratio, and the controller of its weight, against plain float64 Python."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.losses import KlController, compute_approx_kl
from tests.training.algorithms.loss_world import aggregate, make_args, make_world, rows, run

TYPES = {
    "k1": lambda lr, w: w * lr,
    "k2": lambda lr, w: w * lr * lr / 2,
    "mse": lambda lr, w: w * lr * lr / 2,
    "abs": lambda lr, w: w * abs(lr),
    "k3": lambda lr, w: w * (math.exp(-lr) - 1 + lr),
    "low_var_kl": lambda lr, w: min(w * (math.exp(-lr) - 1 + lr), 10.0),
}


@pytest.mark.parametrize("kind", TYPES)
def test_the_kl_of_each_type_is_the_references(kind):
    logits, columns, tokens = make_world(5)
    args = make_args(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind)
    _, metrics, _ = run(args, logits, columns, tokens)
    expected = aggregate(
        "seq-mean-token-mean", rows(lambda new, ref: TYPES[kind](new - ref, 1), columns["new"], columns["ref"])
    )
    assert metrics["kl_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss"] - metrics["pg_loss"] == pytest.approx(0.5 * expected, rel=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_an_unbiased_kl_is_weighted_with_the_ratio_of_probabilities(kind):
    logits, columns, tokens = make_world(5)
    args = make_args(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind, use_unbiased_kl=True)
    _, metrics, _ = run(args, logits, columns, tokens)
    values = rows(
        lambda new, ref, old: TYPES[kind](new - ref, math.exp(new - old)),
        *(columns["new"], columns["ref"], columns["old"]),
    )
    assert metrics["kl_loss"] == pytest.approx(aggregate("seq-mean-token-mean", values), rel=1e-4)
    biased = run(make_args(use_kl_loss=True, kl_loss_type=kind), logits, columns, tokens)[1]["kl_loss"]
    assert abs(biased - metrics["kl_loss"]) > 1e-3


def test_the_gradient_of_the_unbiased_k3_is_that_of_the_kl_itself():
    """E over the old policy of ratio * k3 is KL(new || ref): so are the gradients, which k3's alone is not."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()

    def gradient(kl):
        return torch.autograd.grad(kl, logits)[0].float()

    log_p = logits.log_softmax(0)
    exact = gradient((log_p.exp() * (log_p - ref)).sum())
    log_p = logits.log_softmax(0)
    unbiased = gradient((old * compute_approx_kl(log_p, ref, "k3", log_p.exp() / old)).sum())
    torch.testing.assert_close(unbiased, exact, rtol=1e-4, atol=1e-5)
    log_p = logits.log_softmax(0)
    assert not torch.allclose(gradient((old * compute_approx_kl(log_p, ref, "k3")).sum()), exact, atol=1e-2)


def test_the_clamp_comes_after_the_ratio():
    far = compute_approx_kl(torch.tensor([-5.0]), torch.zeros(1), "low_var_kl", torch.tensor([0.01]))
    assert far.item() == pytest.approx(0.01 * (math.exp(5) - 6), rel=1e-5)
    assert compute_approx_kl(torch.tensor([-5.0]), torch.zeros(1), "low_var_kl", torch.tensor([9.0])).item() == 10.0


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1 + 0.0), (0.11, 1 + 0.1 * 32 / 100), (9.0, 1 + 0.2 * 32 / 100), (-1.0, 1 - 0.2 * 32 / 100)],
)
def test_the_controller_follows_a_clipped_error(kl, factor):
    controller = KlController(0.5, target=0.1, horizon=100)
    controller.update(kl, 32)
    assert controller.coef == pytest.approx(0.5 * factor)


def test_a_fixed_weight_stays():
    controller = KlController(0.5)
    controller.update(1e9, 32)
    assert controller.coef == 0.5
