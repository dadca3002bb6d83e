"""What an optimizer remembers between steps: made before the first, forgotten (--reset-optimizer-states), never kept.

The last is --use-stateless-adam. It changes no weight (nor the fp32 copies of them), no learning rate and no schedule.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.megatron_patch.fused_adam import Adam

MASTER_WEIGHTS = ("param", "master_param")
"""Keys of a parameter's state that hold weights, not moments (Megatron's precision-aware and CPU optimizers)."""


def make_moments(optimizer: Any) -> None:
    """Let every Adam of Megatron's optimizer have its (zero) moments now, where it has none; it would at its first
    step."""
    for one in vars(optimizer).get("chained_optimizers", [optimizer]):
        if isinstance(one.optimizer, Adam):
            one.optimizer.fill_state()


def keep_no_moments(optimizer: Any) -> None:
    """Let every Adam of Megatron's optimizer work without moments; the fp32 weights of a 16-bit model stay."""
    for one in vars(optimizer).get("chained_optimizers", [optimizer]):
        if isinstance(one.optimizer, Adam):
            one.optimizer.is_stateless = True


def reset_optimizer_states(optimizer: Any) -> None:
    """Set the moments and the step count of every parameter to 0.

    Args:
        optimizer: Megatron's, of any kind; it may chain several.
    """
    for one in vars(optimizer).get("chained_optimizers", [optimizer]):
        if one.optimizer is None:
            continue  # this rank has no share of these parameters
        for group in one.optimizer.param_groups:
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0
        for state in one.optimizer.state.values():
            for name, value in state.items():
                if name in MASTER_WEIGHTS:
                    continue
                if torch.is_tensor(value):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
