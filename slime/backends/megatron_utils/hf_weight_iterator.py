"""Walk over a Megatron model as HF tensors, in buckets of bounded size.

It is collective: every rank of a tensor-parallel group iterates, and each gets the full tensors. It does not know
where they go (an engine, a file).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.megatron_to_hf import family_of_args
from slime.backends.megatron_utils.megatron_to_hf.rules import Layout, TensorShape
from slime.backends.megatron_utils.model_provider import unwrap

Bucket = list[tuple[str, torch.Tensor]]


@torch.no_grad()
def iter_hf_buckets(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], *, buffer_size: int
) -> Iterator[Bucket]:
    """Yield lists of (HF name, full tensor) that together make up the model, in the dtype of the parameters.

    Tensors may be views of the model's parameters: use them before the next train step. A tied output layer has no
    tensor of its own.

    Args:
        args: derived flags.
        model: this rank's modules, wrapped or bare.
        buffer_size: bytes of a bucket; exceeded only by a parameter that is larger by itself.
    """
    family, shape = family_of_args(args), TensorShape.of(args)
    bucket: Bucket = []
    num_bytes = 0
    for module in model:
        finish_param_gather(module)
        for name, param in unwrap(module).named_parameters():
            rule, hf_names = family.find(name)
            tensors = rule.layout.to_hf(gather_param(param, rule.layout), shape)
            size = sum(tensor.nbytes for tensor in tensors)
            if bucket and num_bytes + size > buffer_size:
                yield bucket
                bucket, num_bytes = [], 0
            bucket += zip(hf_names, tensors, strict=True)
            num_bytes += size
    if bucket:
        yield bucket


def gather_param(param: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the full tensor of a parameter that may be cut over tensor-parallel ranks (collective over them)."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(param, "tensor_model_parallel", False):
        return param.detach()
    parts = [torch.empty_like(param) for _ in range(group.size())]
    dist.all_gather(parts, param.detach().contiguous(), group=group)
    return layout.join(parts, param.partition_dim)


def finish_param_gather(module: torch.nn.Module) -> None:
    """Wait for the parameters of the last step.

    With --overlap-param-gather the optimizer leaves them to be gathered in the next forward pass; read before it, a
    part of each is one step old.
    """
    ddp_config = getattr(module, "ddp_config", None)
    if ddp_config is not None and ddp_config.overlap_param_gather:
        module.start_param_sync(force_sync=True)
