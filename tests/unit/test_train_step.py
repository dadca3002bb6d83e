"""What one optimizer update reports of the optimizer; the loss and the ranks are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils.model import train_step


def metrics_of(monkeypatch, *, log_num_zeros_in_grad, step_returns):
    monkeypatch.setattr(train_step, "_forward_backward", lambda *_: [{}])
    monkeypatch.setattr(train_step, "reduce_reports", lambda *_: {"loss": 1.0})
    monkeypatch.setattr(train_step, "from_last_stage", lambda metrics: metrics)
    monkeypatch.setattr(train_step.parallel_state, "get_data_parallel_group", lambda **_: None)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.5}], step=lambda: step_returns)
    state = SimpleNamespace(model=[], optimizer=optimizer, scheduler=SimpleNamespace(step=lambda increment: None))
    args = SimpleNamespace(
        custom_megatron_before_train_step_hook_path=None,
        calculate_per_token_loss=False,
        log_num_zeros_in_grad=log_num_zeros_in_grad,
        num_moe_experts=None,
    )
    micro_batches = SimpleNamespace(global_batch_sizes=[8])
    return train_step.train_one_step(args, state, micro_batches, rollout_id=0, step_id=0)


@pytest.mark.parametrize(
    ("asked", "counted", "logged"), [(True, 3, {"num_zeros_in_grad": 3.0}), (True, None, {}), (False, 0, {})]
)
def test_zeros_in_the_gradient_are_logged_when_asked_for(monkeypatch, asked, counted, logged):
    metrics = metrics_of(monkeypatch, log_num_zeros_in_grad=asked, step_returns=(True, 2.0, counted))
    assert metrics == {"loss": 1.0, "grad_norm": 2.0, "lr-pg_0": 0.5, "global_batch_size": 8} | logged
