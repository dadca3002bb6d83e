"""Megatron's schedule over pipeline stages: one pass of micro-batches, and what the last stage made, told to all.

Losses and log-probs are made on the last stage; downstream of a pass every rank has the same data, so whoever reads
columns or metrics need not know of stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.backends.megatron_utils.megatron_patch.known_shapes import known_shapes
from slime.backends.megatron_utils.model_provider import unwrap
from slime.training.micro_batches import MicroBatches
from slime.utils import accelerator

T = TypeVar("T")


def run_pass(
    model: Sequence[torch.nn.Module],
    micro_batches: MicroBatches,
    forward_step: Callable[..., tuple[Any, Any]],
    *,
    step_id: int | None,
    seq_length: int,
    is_of_flags: bool,
) -> list[dict[str, Any]]:
    """Run the micro-batches of a train step with gradients, or those of the whole rollout without.

    Args:
        model: this rank's chunks.
        micro_batches: this rank's share of the rollout.
        forward_step: (iterator of micro-batches, chunk) -> (output, loss function), as Megatron calls it.
        step_id: the train step; None: the rollout.
        seq_length: Megatron's.
        is_of_flags: the model is the one of the flags, whose stages send each other hidden states [T, 1, H].

    Returns:
        what the loss functions report; nothing on stages before the last.
    """
    lengths = micro_batches.row_lengths(step_id)
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    with _shapes_between_stages(model, lengths) if has_stages and is_of_flags else contextlib.nullcontext():
        reports: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[micro_batches.of_step(step_id) for _ in model],
            model=model,
            num_microbatches=len(lengths),
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=step_id is None,
        )
    return reports


def _shapes_between_stages(
    model: Sequence[torch.nn.Module], lengths: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    config = unwrap(model[0]).config
    sharers = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [(length // sharers, 1, config.hidden_size) for length in lengths]
    return known_shapes(shapes, num_chunks=len(model), group_size=config.microbatch_group_size_per_vp_stage)


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
