"""The norm of all gradients, and their scaling, by a few kernels for all of them.

Upstream (0.16.1): without TransformerEngine and Apex it takes the norm of each weight's gradient to the host by
itself, which waits for the GPU as often as a rank has weights (226 times at Qwen3-0.6B), and clips by a scaled copy of
each gradient. It can go when Megatron's own fallback is made of torch's functions for lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Lists = Sequence[Sequence[torch.Tensor]]


def norm_of(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """Euclidean norm of the tensors of all lists, taken together, with the arguments of Apex's `multi_tensor_l2norm`.

    Returns:
        [1], float32, on the tensors' device; and None for the norms of single tensors, which nobody asks for.
    """
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2.0, torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms])).view(1), None


def scale(chunk_size: int, overflow: torch.Tensor, lists: Lists, factor: float) -> None:
    """Multiply tensors by `factor` in place, with the arguments of Apex's `multi_tensor_scale`.

    Args:
        lists: what to read and where to write, the same tensors here.

    Raises:
        ValueError: the two lists are not of the same tensors.
    """
    sources, targets = lists
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        raise ValueError("gradients are scaled in place; sources and targets have to be the same tensors")
    if targets:
        torch._foreach_mul_(targets, factor)


def apply() -> None:
    """Put both where Megatron would take its own; does nothing the second time, or with TransformerEngine or Apex."""
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of
        clip_grads.multi_tensor_scale_impl = scale
