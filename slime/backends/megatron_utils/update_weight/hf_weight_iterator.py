"""Walk over a Megatron model as HF tensors, in buckets of bounded size.

It is collective: every rank iterates, and each gets the full tensors of the tensor- and expert-parallel ranks of its
copy of the model, of all pipeline stages or of its own. Where --hf-checkpoint is quantised, so are they: an engine and
an HF export take the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket, stored_bytes
from slime.backends.megatron_utils.model.model_weights import Weight, is_tied_copy, iter_weights
from slime.config.args import Args
from slime.models.families import family_of_checkpoint
from slime.models.family import Family
from slime.models.layouts import Layout, TensorShape
from slime.utils import accelerator
from slime.utils.misc import chunks_of_size
from slime.weights.formats import format_of_checkpoint
from slime.weights.names import kept_together

Bucket = list[tuple[str, torch.Tensor]]


@torch.no_grad()
def iter_hf_buckets(
    args: Args,
    model: Any,
    *,
    buffer_size: int,
    only_own_stage: bool = False,
    merged: bool = True,
) -> Iterator[Bucket]:
    """Yield lists of (HF name, full tensor) that together make up the model.

    The dtype is that of the parameters; where the config of --hf-checkpoint has a quantization_config, weights of
    linear layers are fp8 or int4, each followed by its scales.

    Tensors may be views of the model's parameters: use them before the next train step. A tied output layer has no
    tensor of its own.

    Args:
        args: derived flags.
        model: this rank's modules, wrapped or bare, or the weights of another backend
            (`slime.backends.fsdp_utils.weights.WeightSource`).
        buffer_size: bytes of a bucket; exceeded only by a parameter that is larger by itself, or with those that
            engines load only together with it.
        only_own_stage: what other pipeline stages have is theirs to send.
        merged: LoRA adapters are added to the weights under them; otherwise those weights are as they were loaded.

    Raises:
        QuantizationError: a weight that is to be quantised is not finite, or no whole groups wide.
    """
    fmt = _format_of(args.hf_checkpoint)
    if isinstance(model, Sequence):
        tensors = _full_tensors(args, model, only_own_stage=only_own_stage, merged=merged)
    else:
        tensors = model.full_tensors(merged=merged)
    for chunk in chunks_of_size(kept_together(tensors), buffer_size, lambda found: stored_bytes(found, fmt)):
        yield quantize_bucket([named for found in chunk for named in found], fmt)


def _full_tensors(
    args: Args, model: Sequence[torch.nn.Module], *, only_own_stage: bool, merged: bool
) -> Iterator[Bucket]:
    family, shape = _family_of(args.model_name, args.hf_checkpoint), TensorShape.of(args)
    for module in model:
        finish_param_gather(module)
    weights = (iter_weights_of_own_stage if only_own_stage else iter_weights_of_all_stages)(model, merged=merged)
    return (gather_hf_tensors(weight, family, shape) for weight in weights)


# The config of a checkpoint does not change during a run, and may lie on a slow disk.
_family_of = functools.cache(family_of_checkpoint)
_format_of = functools.cache(format_of_checkpoint)


def gather_hf_tensors(weight: Weight, family: Family, shape: TensorShape) -> Bucket:
    """Return the HF tensors of a weight and, for an expert's, of those in its place on other expert-parallel ranks.

    Collective over the tensor-parallel ranks (the experts' own, for an expert), and over the expert-parallel ones.
    """
    rule, hf_names = family.find(weight.name, shape.num_layers)
    full = gather_cut(weight, rule.layout)
    if not weight.num_experts_here:
        return list(zip(hf_names, rule.layout.to_hf(full, shape), strict=True))
    found: Bucket = []
    for name, tensor in gather_experts(weight, full):
        _, hf_names = family.find(name, shape.num_layers)
        found += zip(hf_names, rule.layout.to_hf(tensor, shape), strict=True)
    return found


def gather_cut(weight: Weight, layout: Layout) -> torch.Tensor:
    """Return the full tensor of a weight that may be cut over tensor-parallel ranks (collective over them)."""
    if weight.partition_dim is None:
        return weight.tensor
    group = tensor_parallel_group(weight)
    if group.size() == 1:
        return weight.tensor
    parts = [torch.empty_like(weight.tensor) for _ in range(group.size())]
    dist.all_gather(parts, weight.tensor.contiguous(), group=group)
    return layout.join(parts, weight.partition_dim)


def gather_experts(weight: Weight, full: torch.Tensor) -> Bucket:
    """Return (name in the whole model, tensor) of an expert's weight on every expert-parallel rank (collective)."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1:
        return [(weight.name, full)]
    parts = [torch.empty_like(full) for _ in range(group.size())]
    dist.all_gather(parts, full.contiguous(), group=group)
    return [(weight.of_expert_rank(rank), part) for rank, part in enumerate(parts)]


def tensor_parallel_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks over which a weight may be cut."""
    if weight.num_experts_here:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def finish_param_gather(module: torch.nn.Module) -> None:
    """Wait for the parameters of the last step.

    With --overlap-param-gather the optimizer leaves them to be gathered in the next forward pass; read before it, a
    part of each is one step old.
    """
    ddp_config = getattr(module, "ddp_config", None)
    if ddp_config is not None and ddp_config.overlap_param_gather:
        module.start_param_sync(force_sync=True)


def iter_weights_of_own_stage(model: Sequence[torch.nn.Module], *, merged: bool = True) -> Iterator[Weight]:
    """Every weight of this rank's chunks, wrapped or bare; the last stage's copy of a tied embedding is left out.

    With `merged`, LoRA adapters are merged into the weights under them.
    """
    weights = ((chunk, weight) for chunk in model for weight in iter_weights(chunk, merged=merged))
    return (weight for chunk, weight in weights if not is_tied_copy(chunk, weight))


def iter_weights_of_all_stages(model: Sequence[torch.nn.Module], *, merged: bool = True) -> Iterator[Weight]:
    """Every weight of the model, as this rank's place in each stage holds it: stage by stage, one tensor at a time.

    The last stage's copy of a tied embedding is left out. Tensors of other stages are valid until the next one is
    asked for, or as long as they are kept.

    Args:
        model: this rank's chunks, wrapped or bare.
        merged: as of `iter_weights_of_own_stage`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        yield from iter_weights_of_own_stage(model, merged=merged)
        return
    mine = list(iter_weights_of_own_stage(model, merged=merged))
    described: list[Any] = [None] * group.size()
    of_mine = [(replace(weight, tensor=torch.empty(0)), weight.tensor.shape, weight.tensor.dtype) for weight in mine]
    dist.all_gather_object(described, of_mine, group=group)
    for stage, weights in enumerate(described):
        source = dist.get_global_rank(group, stage)
        for index, (weight, shape, dtype) in enumerate(weights):
            if stage == group.rank():
                tensor = mine[index].tensor.contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=accelerator.current_device())
            dist.broadcast(tensor, src=source, group=group)
            yield replace(weight, tensor=tensor)
