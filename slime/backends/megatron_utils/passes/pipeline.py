"""What one pipeline stage knows, told to all: the outputs of the last one, and the weights of each.

Losses and log-probs are made on the last stage; downstream of a pass every rank has the same data, so whoever reads
columns or metrics need not know of stages. Weights are walked stage by stage. Everything here is collective over the
ranks of one pipeline, and does nothing where there is one stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.backends.megatron_utils.model.model_weights import Weight, is_tied_copy, iter_weights
from slime.utils import accelerator

T = TypeVar("T")


def from_last_stage(value: T) -> T:
    """The last stage's `value` (small, picklable), whatever the other stages give."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    held: list[Any] = [value if parallel_state.is_pipeline_last_stage() else None]
    dist.broadcast_object_list(
        held,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    found: T = held[0]
    return found


def columns_from_last_stage(
    columns: Mapping[str, Sequence[torch.Tensor]], names: Sequence[str], lengths: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """The last stage's float32 columns, in one broadcast.

    Args:
        columns: [S][R] by name on the last stage; not looked at elsewhere.
        names: of the columns, the same on every stage.
        lengths: [S] R.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {name: list(columns[name]) for name in names}
    total, device = sum(lengths), accelerator.current_device()
    if parallel_state.is_pipeline_last_stage():
        flat = torch.cat([value.float() for name in names for value in columns[name]])
    else:
        flat = torch.empty(len(names) * total, dtype=torch.float32, device=device)
    dist.broadcast(
        flat,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return {name: list(column.split(list(lengths))) for name, column in zip(names, flat.split(total), strict=True)}


def iter_weights_of_own_stage(model: Sequence[torch.nn.Module]) -> Iterator[Weight]:
    """Every weight of this rank's chunks, wrapped or bare; the last stage's copy of a tied embedding is left out."""
    return (weight for chunk in model for weight in iter_weights(chunk) if not is_tied_copy(chunk, weight))


def iter_weights_of_all_stages(model: Sequence[torch.nn.Module]) -> Iterator[Weight]:
    """Every weight of the model, as this rank's place in each stage holds it: stage by stage, one tensor at a time.

    The last stage's copy of a tied embedding is left out. Tensors of other stages are valid until the next one is
    asked for, or as long as they are kept.

    Args:
        model: this rank's chunks, wrapped or bare.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        yield from iter_weights_of_own_stage(model)
        return
    mine = list(iter_weights_of_own_stage(model))
    described: list[Any] = [None] * group.size()
    dist.all_gather_object(described, [_describe(weight) for weight in mine], group=group)
    for stage, weights in enumerate(described):
        source = dist.get_global_rank(group, stage)
        for index, (weight, shape, dtype) in enumerate(weights):
            if stage == group.rank():
                tensor = mine[index].tensor.contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=accelerator.current_device())
            dist.broadcast(tensor, src=source, group=group)
            yield replace(weight, tensor=tensor)


def _describe(weight: Weight) -> tuple[Weight, torch.Size, torch.dtype]:
    return replace(weight, tensor=torch.empty(0)), weight.tensor.shape, weight.tensor.dtype
