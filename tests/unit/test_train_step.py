"""What one optimizer update reports of the optimizer; the loss and the ranks are left out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.layers import mtp
from slime.backends.megatron_utils.passes import forward


def step(monkeypatch, *, optimizer_returns, log_num_zeros_in_grad=False, clip=None):
    """(metrics, advances of the schedule) of a step of 8 rollouts."""
    advances = []
    monkeypatch.setattr(forward, "_forward_backward", lambda *_: [{}])
    monkeypatch.setattr(forward, "reduce_reports", lambda *_: {"loss": 1.0})
    monkeypatch.setattr(forward, "from_last_stage", lambda metrics: metrics)
    monkeypatch.setattr(forward.parallel_state, "get_data_parallel_group", lambda **_: None)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.5}], step=lambda: optimizer_returns)
    optimizer.get_grad_norm = clip
    scheduler = SimpleNamespace(step=lambda increment: advances.append(increment))
    state = SimpleNamespace(model=[], optimizer=optimizer, scheduler=scheduler)
    args = SimpleNamespace(
        custom_megatron_before_train_step_hook_path=None,
        calculate_per_token_loss=False,
        log_num_zeros_in_grad=log_num_zeros_in_grad,
        num_moe_experts=None,
    )
    micro_batches = SimpleNamespace(global_batch_sizes=[8])
    return forward.train_one_step(args, state, micro_batches, rollout_id=0, step_id=0), advances


@pytest.mark.parametrize(
    ("asked", "counted", "logged"), [(True, 3, {"num_zeros_in_grad": 3.0}), (True, None, {}), (False, 0, {})]
)
def test_zeros_in_the_gradient_are_logged_when_asked_for(monkeypatch, asked, counted, logged):
    metrics, _ = step(monkeypatch, log_num_zeros_in_grad=asked, optimizer_returns=(True, 2.0, counted))
    assert metrics == {"loss": 1.0, "grad_norm": 2.0, "lr-pg_0": 0.5, "global_batch_size": 8} | logged


def test_the_schedule_goes_on_by_the_rollouts_of_an_update_and_stands_still_without_one(monkeypatch):
    _, advances = step(monkeypatch, optimizer_returns=(True, 2.0, None))
    assert advances == [8]
    # a gradient in fp16 overflowed: Megatron lowers the loss scale and updates nothing
    metrics, advances = step(monkeypatch, optimizer_returns=(False, None, None))
    assert advances == [] and "grad_norm" not in metrics


def prediction_clip(monkeypatch, *, of_policy, grad):
    """The clip of an optimizer (its norms take process groups; what is done with them is tested here)."""
    monkeypatch.setattr(mtp, "_prediction_norm", lambda part: float(grad.norm()))
    monkeypatch.setattr(mtp, "_prediction_grads", lambda part: [(grad, grad)])
    config = SimpleNamespace(clip_grad=1.0)
    return mtp.PredictionClip(
        SimpleNamespace(get_grad_norm=lambda: of_policy, config=config, chained_optimizers=[None])
    )


@pytest.mark.parametrize(("of_policy", "factor"), [(4.0, 4 / 5), (0.5, 1 / 5), (math.inf, 1.0), (math.nan, 1.0)])
def test_predictions_are_scaled_by_their_own_norm_unless_the_policys_is_not_finite(monkeypatch, of_policy, factor):
    """Megatron scales by 1 / 4 afterwards where the policy's norm is 4: of a norm of 5, 1 is left."""
    grad = torch.tensor([3.0, 4.0])
    clip = prediction_clip(monkeypatch, of_policy=of_policy, grad=grad)
    assert clip() == pytest.approx(of_policy, nan_ok=True) and clip.norm == 5.0
    assert grad.norm() == pytest.approx(5 * factor, rel=1e-5)


def test_a_step_whose_gradients_overflowed_has_no_norm_of_predictions(monkeypatch):
    clip = prediction_clip(monkeypatch, of_policy=1.0, grad=torch.tensor([3.0, 4.0]))
    clip()  # the step before
    metrics, _ = step(monkeypatch, optimizer_returns=(False, None, None), clip=clip)
    assert "mtp_grad_norm" not in metrics
