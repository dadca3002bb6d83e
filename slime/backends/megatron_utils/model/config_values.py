"""What `args` says about the fields of a Megatron config: the step from flags to the dataclasses that are built."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.megatron.flag_classes import fields_without_effect

if TYPE_CHECKING:
    import torch

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_TYPED = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def config_kwargs(config: type, args: Args) -> dict[str, Any]:
    """Return {field: value} for the fields that `args` has.

    Fields whose option has no effect here (`warned` in megatron_flags.py) keep the config's default, and names of
    types ("fp32") become torch's types.
    """
    values, without_effect = vars(args), fields_without_effect()
    return {
        field.name: _typed(field.name, values[field.name])
        for field in dataclasses.fields(config)
        if field.name in values and field.name not in without_effect
    }


def _typed(name: str, value: Any) -> Any:
    return torch_type(value) if name in _TYPED and value is not None else value


def torch_type(name: str | torch.dtype) -> torch.dtype:
    """Return the torch type with this name, torch's own ("bfloat16") or Megatron's ("bf16"); a type is itself."""
    import torch

    return getattr(torch, _TYPES.get(name, name)) if isinstance(name, str) else name
