"""What `args` says about the fields of a Megatron config: the step from flags to the dataclasses that are built."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from slime.backends.megatron_utils.flag_classes import fields_without_effect

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_TYPED = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def config_kwargs(config: type, args: argparse.Namespace) -> dict[str, Any]:
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
    if name not in _TYPED or not isinstance(value, str):
        return value
    import torch

    return getattr(torch, _TYPES[value])
