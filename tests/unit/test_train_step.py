"""What one optimizer update reports of the optimizer; the loss and the ranks are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils.passes import forward


def step(monkeypatch, *, optimizer_returns, log_num_zeros_in_grad=False):
    """(metrics, advances of the schedule) of a step of 8 rollouts."""
    advances = []
    monkeypatch.setattr(forward, "_forward_backward", lambda *_: [{}])
    monkeypatch.setattr(forward, "reduce_reports", lambda *_: {"loss": 1.0})
    monkeypatch.setattr(forward, "from_last_stage", lambda metrics: metrics)
    monkeypatch.setattr(forward.parallel_state, "get_data_parallel_group", lambda **_: None)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.5}], step=lambda: optimizer_returns)
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
