"""The weights of a Megatron model under the names that they have in the whole model, whatever this rank holds of it.

A rank counts its layers and experts from 0; here they carry the numbers of the whole model, so that the rule tables
(slime.models.family) apply. Layers that predict further tokens are numbered behind the others. Beside parameters
there is one kind of buffer that is a weight: the bias by which routers with `--moe-router-enable-expert-bias` choose
experts. How weights are gathered, or what they are called in an HF
model, it does not know.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.model_provider import unwrap
from slime.models.family import numbered_in_model

EMBEDDING = "embedding.word_embeddings.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
ADAPTER = "lora"
"""The child of a linear layer that holds its LoRA adapter."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


@dataclass(frozen=True)
class Weight:
    """One tensor of the model, as far as this rank holds it.

    Attributes:
        name: in the whole model, e.g. "decoder.layers.7.mlp.experts.local_experts.5.linear_fc1.weight".
        tensor: the live tensor, or a view of it.
        partition_dim: the dimension cut over tensor-parallel ranks; None where each of them has all of it.
        num_experts_here: experts of each expert-parallel rank, for a weight of one expert; 0 for any other weight.
    """

    name: str
    tensor: torch.Tensor
    partition_dim: int | None = None
    num_experts_here: int = 0

    def of_expert_rank(self, rank: int) -> str:
        """The name of the weight that another expert-parallel rank has in this one's place."""
        return _EXPERT.sub(lambda m: str(int(m[0]) % self.num_experts_here + rank * self.num_experts_here), self.name)


@dataclass(frozen=True)
class _Place:
    """Where a weight is kept, as long as its module lives: the tensor there may become another one."""

    module: weakref.ref[torch.nn.Module]
    name_there: str
    is_parameter: bool
    name: str
    num_experts_here: int

    def weight(self, *, merged: bool) -> Weight:
        module = self.module()
        assert module is not None, f"the module of {self.name} is gone while its model lives"
        tensor = (module._parameters if self.is_parameter else module._buffers)[self.name_there]
        assert tensor is not None, f"{self.name} was taken out of the model"
        is_cut = getattr(tensor, "tensor_model_parallel", False)
        adapter = getattr(module, ADAPTER, None) if merged and self.name_there == "weight" else None
        value = tensor.detach() if adapter is None else adapter.merged(tensor)
        return Weight(self.name, value, tensor.partition_dim if is_cut else None, self.num_experts_here)


_PLACES: weakref.WeakKeyDictionary[torch.nn.Module, list[_Place]] = weakref.WeakKeyDictionary()
"""Of each model that was walked over: Python takes milliseconds for that, and every weight sync asks anew."""


def iter_weights(module: torch.nn.Module, *, merged: bool = False) -> Iterator[Weight]:
    """Every weight that this rank holds of one model chunk, wrapped or bare, in the order of `named_tensors`.

    LoRA adapters are no weights of their own; with `merged`, weights under them have them added (in new tensors).
    """
    model = unwrap(module)
    if model not in _PLACES:
        _PLACES[model] = list(_find_places(model))
    return (place.weight(merged=merged) for place in _PLACES[model])


def _find_places(model: torch.nn.Module) -> Iterator[_Place]:
    offset = _layer_offset(model)
    experts_here = (getattr(model, "config", None) and model.config.num_moe_experts) or 0
    experts_here //= parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts_here * parallel_state.get_expert_model_parallel_rank()
    for name, tensor in named_tensors(model):
        if is_of_adapter(name):
            continue
        path, _, name_there = name.rpartition(".")
        is_mtp = name.startswith("mtp.")
        numbered, is_expert = _in_whole_model(name, offset, first_expert, model.config.num_layers if is_mtp else 0)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        owner = weakref.ref(model.get_submodule(path))
        yield _Place(owner, name_there, is_parameter, numbered, experts_here if is_expert else 0)


def _in_whole_model(name: str, offset: int, first_expert: int, num_layers: int) -> tuple[str, bool]:
    """The name with its numbers in the whole model, and whether it is of one expert.

    `num_layers` is of the model, for a layer that predicts further tokens; 0 for any other.
    """
    numbered = _LAYER.sub(lambda m: str(int(m[0]) + offset), name)
    if num_layers:
        numbered = numbered_in_model(numbered, num_layers)
    return _EXPERT.sub(lambda m: str(int(m[0]) + first_expert), numbered), bool(_EXPERT.search(name))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is part of a LoRA adapter, by its name (wrappers' prefixes allowed)."""
    return f".{ADAPTER}." in name


def is_tied_copy(module: torch.nn.Module, weight: Weight) -> bool:
    """Whether a weight is the last pipeline stage's copy of the embedding, which it uses as the output layer."""
    if weight.name != "output_layer.weight":
        return False
    return bool(getattr(unwrap(module), "share_embeddings_and_output_weights", False))


def num_copies(weight: Weight) -> int:
    """Ranks of a pipeline stage that hold the same part of a weight."""
    if weight.num_experts_here:
        shared = parallel_state.get_expert_data_parallel_world_size()
        cuts = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        shared = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        cuts = parallel_state.get_tensor_model_parallel_world_size()
    return int(shared * (1 if weight.partition_dim is not None else cuts))


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names on this rank and live tensors of all parameters and of the buffers that are weights."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(EXPERT_BIAS))


def _layer_offset(model: torch.nn.Module) -> int:
    """Layers of the whole model before the first one of this chunk."""
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    return int(layers[0].layer_number) - 1 if layers else 0


def keep_expert_biases_in_fp32(module: torch.nn.Module) -> None:
    """Undo the cast of Megatron's 16-bit wrapper: the updates of these biases are smaller than 16 bit resolves."""
    for name, buffer in module.named_buffers():
        if name.endswith(EXPERT_BIAS):
            buffer.data = buffer.data.float()
