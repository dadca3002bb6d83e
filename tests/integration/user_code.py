"""Hooks as a user would write them; loaded by path in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PERTURBATION = 0.5
BEFORE_LOG_PROBS_OF_ROLLOUT = 1
BEFORE_TRAIN_STEP_OF_ROLLOUT = 2
_passes = 0


async def share_of_digits(args: Any, sample: Any, **_: Any) -> float:
    """How much of the response are digits: differs between the samples of a group, so that there is a gradient."""
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))


def perturb_before_log_probs(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    """Change the trainer's weights after the sync, before the old-log-prob pass of one rollout."""
    global _passes
    if _passes == BEFORE_LOG_PROBS_OF_ROLLOUT:
        _perturb(model)
    _passes += 1


def perturb_before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Change the trainer's weights between the old-log-prob pass and the train step of one rollout."""
    if rollout_id == BEFORE_TRAIN_STEP_OF_ROLLOUT:
        _perturb(model)


def _perturb(model: list[torch.nn.Module]) -> None:
    name, weight = next((n, p) for n, p in model[0].named_parameters() if "linear_fc2" in n)
    with torch.no_grad():
        weight.add_(PERTURBATION * torch.randn_like(weight) * weight.std())


def sign_version(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Leave a file in each version of the weights; every rank is called."""
    if torch.distributed.get_rank() == 0:
        text = f"{torch.distributed.get_world_size()} ranks, {len(rollout_engines)} engine"
        (Path(version_dir) / "signed_by").write_text(text)
