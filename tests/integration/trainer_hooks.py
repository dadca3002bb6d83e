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


def perturb_reference(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    if store_prefix == "ref_":
        perturb_before_log_probs(args, model, store_prefix)


@torch.no_grad()
def perturb_before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    list(model[0].parameters())[-1].mul_(3)  # the output layer


def no_advantage(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    CALLS.append((rollout_id, sorted(rollout_data)))
    rollout_data["advantages"] = [torch.zeros_like(a) for a in rollout_data["advantages"]]


def remember_args(args: Any) -> None:
    CALLS.append(args)


def model_that_tells_its_widths(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> torch.nn.Module:
    """The usual model of the args that `remember_args` saw; notes how many tokens each micro-batch has."""
    from slime.backends.megatron_utils.model_provider import build_gpt

    model = build_gpt(CALLS[0], pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    model.embedding.register_forward_pre_hook(
        lambda module, values, named: CALLS.append(named.get("input_ids", *values[:1]).shape[1]), with_kwargs=True
    )
    return model
