"""TIS, IcePop, OPSM and the user's function against plain float64 Python."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.losses import compute_opsm_mask
from slime.algorithms.policy import PolicyLoss
from tests.training.algorithms.loss_world import (
    MASKS,
    advantages_of,
    aggregate,
    log_ratios,
    make_args,
    make_world,
    rows,
    run,
    token_loss,
)

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
LOW, HIGH = 0.8, 1.3


def token_losses(estimator, columns, data):
    ratios = log_ratios(estimator, columns["new"], columns["old"])
    return rows(lambda *token: token_loss(estimator, *token), ratios, columns["new"], advantages_of(data))


def mean(values):
    return aggregate("seq-mean-token-mean", values)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("path", [None, ICEPOP])
def test_tis_and_icepop_weigh_each_token_as_the_reference(estimator, path):
    logits, columns, tokens = make_world(6)
    correction = {"use_tis": True, "tis_clip": HIGH, "tis_clip_low": LOW, "custom_tis_function_path": path}
    args = make_args(advantage_estimator=estimator, **correction)
    _, metrics, data = run(args, logits, columns, tokens)

    def weight(old, rollout):
        w = math.exp(old - rollout)
        return min(max(w, LOW), HIGH) if path is None else w * (LOW <= w <= HIGH)

    weights = rows(weight, columns["old"], columns["rollout"])
    losses = token_losses(estimator, columns, data)
    assert metrics["pg_loss"] == pytest.approx(mean(rows(lambda w, x: w * x, weights, losses)), rel=1e-5)
    exact = rows(lambda old, rollout: math.exp(old - rollout), columns["old"], columns["rollout"])
    changed = rows(lambda w, e: float(w != e), weights, exact)
    assert metrics["tis_clipfrac"] == pytest.approx(mean(changed)) and 0 < mean(changed) < 3
    assert metrics["tis"] == pytest.approx(mean(exact), rel=1e-5)
    assert metrics["tis_abs"] == pytest.approx(mean(rows(lambda e: abs(e - 1), exact)), rel=1e-4)
    ratios = log_ratios(estimator, columns["new"], columns["old"])
    assert metrics["ois"] == pytest.approx(mean(rows(math.exp, ratios)), rel=1e-5)


def test_an_icepop_token_outside_the_bounds_has_no_gradient():
    logits, columns, tokens = make_world(6)
    columns["rollout"][1][0] = columns["old"][1][0] - math.log(3)  # the only token of the second sample
    bounds = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.5}
    row = len(tokens[0]) + 1
    gradient, _, _ = run(make_args(**bounds, custom_tis_function_path=ICEPOP), logits, columns, tokens)
    assert not gradient[0, row].any() and gradient[0, 1].any()
    assert run(make_args(**bounds), logits, columns, tokens)[0][0, row].any(), "TIS truncates instead"


def leave_out_the_second(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, **more):
    assert more == {"response_lengths": [len(mask) for mask in MASKS]}
    assert [total - length for total, length in zip(total_lengths, more["response_lengths"], strict=True)] == [2] * 4
    gap = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    masks = [mask * (i != 1) for i, mask in enumerate(loss_masks)]
    return 2 * pg_loss, masks, {"gap": gap}


def test_a_function_of_the_user_replaces_tis_and_may_leave_tokens_out():
    logits, columns, tokens = make_world(6)
    path = f"{__file__}:leave_out_the_second"
    args = make_args(use_tis=True, custom_tis_function_path=path)
    gradient, metrics, data = run(args, logits, columns, tokens)
    losses = token_losses("grpo", columns, data)
    losses[1] = [0.0]
    assert metrics["pg_loss"] == pytest.approx(2 * mean(losses), rel=1e-5)
    gap = rows(lambda a, b: a - b, columns["old"], columns["rollout"])
    assert metrics["gap"] == pytest.approx(mean(gap), rel=1e-4), "metrics are of every trained token"
    assert not gradient[0, len(tokens[0]) + 1].any()


def test_mismatch_can_be_measured_without_tis():
    logits, columns, tokens = make_world(6)
    path = f"{__file__}:leave_out_the_second"
    measured = run(make_args(get_mismatch_metrics=True, custom_tis_function_path=path), logits, columns, tokens)[1]
    assert "gap" in measured
    assert "gap" not in run(make_args(custom_tis_function_path=path), logits, columns, tokens)[1]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("delta", [0.01, 0.1, 10.0])
def test_opsm_leaves_out_bad_samples_that_the_policy_has_left(estimator, delta):
    logits, columns, tokens = make_world(7)
    columns["old"] = [[x + 0.05 for x in row] for row in columns["new"]]  # 0.05 nats per token away ...
    columns["old"][1] = [columns["new"][1][0] + 0.2]  # ... and the second, with a negative reward, 0.2
    args = make_args(advantage_estimator=estimator, use_opsm=True, opsm_delta=delta)
    _, metrics, data = run(args, logits, columns, tokens)
    advantages = advantages_of(data)
    distance = [0.05, 0.2, 0.0, 0.05]
    left = [[float(a < 0 and d > delta) for a in row] for row, d in zip(advantages, distance, strict=True)]
    losses = rows(lambda x, gone: x * (1 - gone), token_losses(estimator, columns, data), left)
    assert metrics["pg_loss"] == pytest.approx(mean(losses), rel=1e-5)
    assert metrics["opsm_clipfrac"] == pytest.approx(mean(left))
    # both negative samples at 0.01 (one of them shares a rollout with a positive one), one at 0.1, none at 10
    assert [sum(map(any, left))] == {0.01: [2], 0.1: [1], 10.0: [0]}[delta]


@pytest.mark.parametrize("of_the_tool", [-9.0, 9.0, math.inf, math.nan])
def test_opsm_measures_trained_tokens_alone(of_the_tool):
    """Trained tokens are 0.1 and 0.3 nats away, 0.2 in the mean; the masked token between them counts for nothing."""
    new, old = [torch.zeros(3)], [torch.tensor([0.1, of_the_tool, 0.3])]
    advantages, masks = [torch.full((3,), -1.0)], [torch.tensor([1, 0, 1])]
    assert compute_opsm_mask(new, old, advantages, masks, 0.19).tolist() == [0, 0, 0]
    assert compute_opsm_mask(new, old, advantages, masks, 0.21).tolist() == [1, 1, 1]


def test_a_rollout_without_engine_log_probs_cannot_be_corrected():
    ones = torch.ones(1)
    batch = {"advantages": [ones], "loss_masks": [ones], "response_lengths": [1], "total_lengths": [2]}
    with pytest.raises(ValueError, match="--use-tis and --get-mismatch-metrics need samples with rollout_log_probs"):
        PolicyLoss.of(make_args(use_tis=True))(batch, {"log_probs": ones, "entropy": ones}, torch.sum)
