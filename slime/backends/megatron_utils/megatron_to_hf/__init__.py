"""Rename and re-lay Megatron parameters as HF tensors (full tensors; see slime.models.family for the rules).

It gathers nothing and writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_params
from slime.config.args import Args
from slime.models.families import family_of
from slime.models.family import numbered_in_model
from slime.models.layouts import TensorShape

if TYPE_CHECKING:
    import torch

__all__ = ["convert_to_hf", "remove_padding"]


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
