"""Stands in for flash-attn 3, which has no wheel for this torch: torch's own variable-length attention.

transformers imports these names for `attn_implementation="flash_attention_3"`, which verl's packed batches need. The
kernel below is the flash attention that torch ships, so verl computes what it would with the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **unused: Any,
) -> torch.Tensor:
    """Attention over packed sequences: `[T, heads, dim]` -> `[T, heads, dim]`."""
    _refuse(unused)
    left, right = window_size
    return varlen_attn(
        q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k),
        scale=softmax_scale, window_size=(left, 0 if causal else right),
    )  # fmt: skip


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention over sequences of one length: `[B, length, heads, dim]`."""
    batch, length, heads, dim = q.shape
    ends_q, ends_k = (torch.arange(0, (batch + 1) * size, size, device=q.device) for size in (length, k.shape[1]))
    flat_q, flat_k, flat_v = (tensor.reshape(-1, tensor.shape[2], dim) for tensor in (q, k, v))
    flat = flash_attn_varlen_func(flat_q, flat_k, flat_v, ends_q, ends_k, length, k.shape[1], **options)
    return flat.view(batch, length, heads, dim)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    """Refuse: no trainer decodes."""
    raise NotImplementedError("this stand-in of flash-attn has no attention over a cache")


def _refuse(options: dict[str, Any]) -> None:
    asked = {name: value for name, value in options.items() if value not in (None, False, 0, 0.0)}
    asked.pop("deterministic", None)
    if asked:
        raise NotImplementedError(f"this stand-in of flash-attn has no {asked}")
