"""Load an HF checkpoint into a Megatron model, each rank its own share, with no full HF model in memory.

The tables are those of megatron_to_hf. Optimizers hold their own fp32 copies: whoever has one must refresh it
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slime.backends.megatron_utils.layers.value_head import is_of_head, load_head_from_hf, value_head_of
from slime.backends.megatron_utils.model.model_weights import EMBEDDING, Weight, is_tied_copy, iter_weights
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import tensor_parallel_group
from slime.config.args import Args
from slime.conversion.reader import SafetensorsReader
from slime.models.families import family_of_args
from slime.models.family import Rule
from slime.models.hf_config import SUPPORTED_MODEL_TYPES
from slime.models.layouts import TensorShape
from slime.utils.distributed_utils import gathered
from slime.utils.errors import UsageError
from slime.weights.names import left_over

__all__ = ["SUPPORTED_MODEL_TYPES", "load_hf_weights"]


@torch.no_grad()
def load_hf_weights(args: Args, model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Copy the HF checkpoint at `path` into the parameters of `model`; a value head stays fresh where it has none.

    Collective, once, before a weight is read: which tensors no rank has a place for.

    Args:
        args: derived flags; the family comes from --model-name or --hf-checkpoint.
        model: this rank's modules, wrapped or bare.

    Raises:
        UsageError: when a tensor is missing, has another shape than the flags say, or is left over.
    """
    family, shape, reader = family_of_args(args), TensorShape.of(args), SafetensorsReader(path)
    found: list[tuple[Weight, Rule, tuple[str, ...]]] = []
    used: set[str] = set()
    for module in model:
        head = value_head_of(module)
        if head is not None:
            used |= {"score.weight", "score.bias", "lm_head.weight"}  # a policy's output layer is not a critic's
        for weight in iter_weights(module):
            if head is not None and is_of_head(weight.name):
                continue
            rule, hf_names = family.find(EMBEDDING if is_tied_copy(module, weight) else weight.name, shape.num_layers)
            found.append((weight, rule, hf_names))
            used.update(hf_names)
    # Before the first weight is read: behind it a rank may have failed, and the others would wait here.
    used = set().union(*gathered(used))
    if not args.custom_model_provider_path and (
        left := left_over(Path(path), reader.names(), used, args.mtp_num_layers or 0)
    ):
        raise UsageError(left)
    for head in filter(None, map(value_head_of, model)):
        load_head_from_hf(head, reader)
    for weight, rule, hf_names in found:
        try:
            _copy_share(weight, rule, [reader.get(name) for name in hf_names], shape)
        except UsageError:
            raise  # of the reader, which has said what is wrong with the file
        except ValueError as error:
            raise UsageError(f"{path}: {', '.join(hf_names)} {error}.") from error


def _copy_share(weight: Weight, rule: Rule, tensors: Sequence[torch.Tensor], shape: TensorShape) -> None:
    """Copy this rank's share of the HF tensors that make a weight.

    Raises:
        ValueError: they do not fit.
    """
    try:
        full = rule.layout.to_megatron(tensors, shape)
    except RuntimeError as error:
        raise ValueError(f"do not fit the model flags ({error})") from error
    group = tensor_parallel_group(weight)
    if group.size() > 1 and weight.partition_dim is not None:
        full = rule.layout.split(full, group.size(), weight.partition_dim)[group.rank()]
    if full.shape != weight.tensor.shape:
        raise ValueError(
            f"make a {weight.name} of shape {tuple(full.shape)}, the flags describe {tuple(weight.tensor.shape)}"
        )
    weight.tensor.copy_(full)
