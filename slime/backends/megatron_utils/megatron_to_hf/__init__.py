"""Rename and re-lay Megatron parameters as HF tensors (full tensors; see rules.py for the tables).

It gathers nothing and writes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.megatron_to_hf.layouts import TensorShape
from slime.backends.megatron_utils.megatron_to_hf.processors import quantize_params
from slime.backends.megatron_utils.megatron_to_hf.rules import Family, family_of, numbered_in_model
from slime.config.args import Args

if TYPE_CHECKING:
    import torch

__all__ = ["convert_to_hf", "family_of_args", "remove_padding"]


def family_of_args(args: Args) -> Family:
    """Return the rule table for `--model-name`, or for the model_type of --hf-checkpoint's config."""
    return family_of_checkpoint(args.model_name, args.hf_checkpoint)


def family_of_checkpoint(model_name: str | None, checkpoint: str | Path) -> Family:
    """Return the rule table for a family's name; without one for the model_type of a checkpoint's config."""
    if model_name:
        return family_of(model_name)
    return family_of(json.loads((Path(checkpoint) / "config.json").read_text())["model_type"])


def convert_to_hf(
    args: Args, model_name: str, name: str, param: torch.Tensor, quantization_config: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Return the HF (name, tensor) pairs that a full Megatron parameter holds; tensors may be views of `param`.

    Args:
        args: derived flags.
        model_name: the family, e.g. "qwen3".
        name: global Megatron name, "module." prefixes allowed; prediction layers ("mtp.layers.0.") count from 0.
        param: gathered over tensor-parallel ranks, padding vocabulary included or not.
        quantization_config: of the HF config; each weight that it quantises is followed by its scales.

    Raises:
        KeyError: when the family has no such parameter.
        UsageError: a quantisation that is not supported.
    """
    rule, hf_names = family_of(model_name).find(numbered_in_model(name, args.num_layers), args.num_layers)
    found = list(zip(hf_names, rule.layout.to_hf(param, TensorShape.of(args)), strict=True))
    return quantize_params(args, name, found, quantization_config)


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Drop the padding rows of the embedding and the output layer; other parameters pass unchanged."""
    is_vocab = any(part in name for part in ("embedding.word_embeddings.weight", "output_layer.weight"))
    return param[:vocab_size] if is_vocab else param
