"""Hooks that the trainer's tests plug in by path; what they saw is in `CALLS`, in the process that ran them."""

from __future__ import annotations

from typing import Any

import torch

CALLS: list[Any] = []


def record_log_prob_pass(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    CALLS.append(store_prefix)


def record_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    gradients = sum(float(p.main_grad.abs().sum()) for p in model[0].parameters())
    CALLS.append((rollout_id, step_id, gradients, opt_param_scheduler.num_steps))


@torch.no_grad()
def perturb_before_log_probs(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    list(model[0].parameters())[-1].mul_(3)  # the output layer


@torch.no_grad()
def perturb_before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    list(model[0].parameters())[-1].mul_(3)  # the output layer


def no_advantage(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    CALLS.append((rollout_id, sorted(rollout_data)))
    rollout_data["advantages"] = [torch.zeros_like(a) for a in rollout_data["advantages"]]
