"""Weights that are read without a call of the module that has them, with --overlap-param-gather.

The optimizer then leaves what other ranks have updated to be gathered in the next forward pass, where hooks of
Megatron's wait for a module's own weights when it is called.
"""

from __future__ import annotations

import torch


def wait_for_weights(*modules: torch.nn.Module) -> None:
    """Wait for the weights of modules as calls of these would."""
    for module in modules:
        for wait in module._forward_pre_hooks.values():
            wait(module, ())
