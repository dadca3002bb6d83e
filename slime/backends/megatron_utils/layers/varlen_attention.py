"""Causal attention over packed sequences: the core attention of layers that are not TransformerEngine's.

On CUDA in 16 bit it is one call of torch's varlen kernel. Elsewhere sequences of equal length are stacked, so that a
pack of 128 short sequences takes a few scaled_dot_product_attention calls instead of 128. Under context parallelism
keys and values of all ranks are gathered, and each of a rank's chunks attends to the beginning of its sequence; which
rows those are, slime.backends.megatron_utils.cp_utils says. It has no dropout.

What layers ask of a pack is found once for all of them and kept with Megatron's description of it. To read a tensor
of the GPU, or to copy a list to it, the host waits until the GPU has done all that it was given. In every layer, that
would keep the host from going ahead, and the GPU waiting for it in turn, most of all where a rank has little work for
each layer. What is kept follows from the pack as it was when a layer asked first: who changes a pack makes another
description of it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.cp_utils import KeyChunks, key_chunks
from slime.utils.accelerator import to_device

T = TypeVar("T")


def keep(packed_seq_params: Any, name: str, make: Callable[[], T]) -> T:
    """What `make` returned when this object was first asked for this name; each pass through a model has its own."""
    known, attribute = vars(packed_seq_params), f"_slime_{name}"
    if attribute not in known:
        known[attribute] = make()
    return cast(T, known[attribute])


def cu_seqlens_of(packed_seq_params: Any) -> torch.Tensor:
    """[sequences + 1] where the sequences start, padding included, and the end of the last, on the device."""
    padded = packed_seq_params.cu_seqlens_q_padded
    return cast(torch.Tensor, packed_seq_params.cu_seqlens_q if padded is None else padded)


def note_ends(packed_seq_params: Any, ends: list[int]) -> None:
    """Say what `host_ends` is, where it is known without the GPU."""
    keep(packed_seq_params, "ends", lambda: ends)


def host_ends(packed_seq_params: Any) -> list[int]:
    """`cu_seqlens_of` on the host."""
    return keep(packed_seq_params, "ends", lambda: cu_seqlens_of(packed_seq_params).tolist())


def longest_run(ends: list[int]) -> int:
    """Tokens of the longest of the runs that end and begin there, the first at 0."""
    return max(end - start for start, end in pairwise(ends))


@dataclass(frozen=True)
class Spans:
    """Runs of queries, and of the keys that each sees: whole sequences, or a context-parallel rank's chunks of them.

    Attributes:
        cu_queries, cu_keys: where each starts, and the end of the last.
        cu_seqlens: the same two, int32 on the device.
        longest: run of queries, and of keys.
    """

    cu_queries: list[int]
    cu_keys: list[int]
    cu_seqlens: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]

    @classmethod
    def of(cls, cu_queries: list[int], cu_keys: list[int], device: torch.device) -> Spans:
        """Copy them to the device."""
        queries, keys = (to_device(torch.tensor(cu, dtype=torch.int32), device) for cu in (cu_queries, cu_keys))
        return cls(cu_queries, cu_keys, (queries, keys), (longest_run(cu_queries), longest_run(cu_keys)))


class VarlenAttention(MegatronModule):
    """softmax(q k^T * scale) v within each sequence of a pack, grouped-query heads included.

    Shapes (t packed tokens, h query heads and g key/value heads of this rank, d channels): packed q [t, h, d], k and v
    [t, g, d] -> [t, h * d]; without `packed_seq_params` q [s, b, h, d], k and v [s, b, g, d] -> [s, b, h * d], that is
    b sequences of s tokens. Under context parallelism t are this rank's tokens, and the pack's `cu_seqlens` are those
    of the whole sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        if config.attention_dropout:
            raise ValueError(f"--attention-dropout {config.attention_dropout}: our attention has no dropout; use 0.")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.backend = config.attention_backend
        self.cp_group = pg_collection.cp if pg_collection is not None and config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend; `attention_mask` is ignored: the mask is causal within each sequence."""
        if packed_seq_params is None:
            return self._attend_batch(query, key, value)
        if self.cp_group is not None:
            how: dict[str, Any] = {"scale": self.softmax_scale, "use_kernel": self._use_kernel(query)}
            out = attend_across(query, key, value, packed_seq_params, self.cp_group, **how)
        elif self._use_kernel(query):
            longest = int(packed_seq_params.max_seqlen_q)
            ends = cu_seqlens_of(packed_seq_params).int()
            out = varlen_kernel(query, key, value, (ends, ends), (longest, longest), scale=self.softmax_scale)
        else:
            out = attend_packed(query, key, value, host_ends(packed_seq_params), scale=self.softmax_scale)
        return out.reshape(query.shape[0], -1)

    def _use_kernel(self, query: torch.Tensor) -> bool:
        can = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        if self.backend == AttnBackend.flash and not can:
            raise ValueError(f"--attention-backend flash needs CUDA and 16 bit, not {query.dtype} on {query.device}.")
        return can and self.backend != AttnBackend.unfused

    def _attend_batch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seq_length, batch = query.shape[:2]
        out = _sdpa(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).reshape(seq_length, batch, -1)


def attend_across(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_seq_params: Any,
    cp_group: Any,
    *,
    scale: float,
    use_kernel: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a context-parallel rank's tokens to all ranks' keys and values; shapes of `attend_packed`.

    Back, the gradients of keys and values are summed over the ranks (collective over `cp_group`).
    """
    chunks = key_chunks_of(packed_seq_params, cp_group)
    spans = keep(packed_seq_params, "spans", lambda: Spans.of(chunks.cu_queries, chunks.cu_keys, query.device))
    key, value = gather_keys(key, value, chunks, cp_group)
    return attend_spans(query, key, value, spans, scale=scale, use_kernel=use_kernel, window=window)


def gather_keys(
    key: torch.Tensor, value: torch.Tensor, chunks: KeyChunks, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' keys and values as this rank's queries see them (back: their gradients are summed)."""
    both = torch.cat([key, value], dim=-1)
    both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=cp_group)
    key, value = both.index_select(0, chunks.rows).split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    *,
    scale: float,
    use_kernel: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Attend where there may be more keys than queries; arguments as of `attend_packed`."""
    if not use_kernel:
        ends = {"cu_seqlens": spans.cu_queries, "cu_keys": spans.cu_keys}
        return attend_packed(query, key, value, **ends, scale=scale, window=window)
    return varlen_kernel(query, key, value, spans.cu_seqlens, spans.longest, scale=scale, window=window)


def key_chunks_of(packed_seq_params: Any, cp_group: Any) -> KeyChunks:
    """Which keys this rank's queries see; kept with the pack, for every layer asks the same."""

    def find() -> KeyChunks:
        chunks = key_chunks(host_ends(packed_seq_params), cp_rank=cp_group.rank(), cp_size=cp_group.size())
        return chunks._replace(rows=to_device(chunks.rows, cu_seqlens_of(packed_seq_params).device))

    return keep(packed_seq_params, "key_chunks", find)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: list[int],
    *,
    scale: float,
    cu_keys: list[int] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of a pack.

    Args:
        query: [t, h, d].
        key: [u, g, d], h a multiple of g.
        value: [u, g, e].
        cu_seqlens: where sequences start, and t at the end.
        scale: of the scores.
        cu_keys: where their keys start, and u at the end, if there are more of them than of queries; the queries are
            the last ones of a sequence.
        window: keys that a query sees, itself included; None for all before it.

    Returns:
        [t, h, e].
    """
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (queries, keys) -> their starts
    spans = list(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
    key_spans = spans if cu_keys is None else list(zip(cu_keys[:-1], cu_keys[1:], strict=True))
    for (start, end), (key_start, key_end) in zip(spans, key_spans, strict=True):
        if end > start:
            groups.setdefault((end - start, key_end - key_start), []).append((start, key_start))
    if len(groups) == 1:  # nothing to gather: the pack is already a batch
        length, num_keys = next(iter(groups))
        sizes = ((query, length), (key, num_keys), (value, num_keys))
        out = _sdpa(*(x.unflatten(0, (-1, size)).transpose(1, 2) for x, size in sizes), scale=scale, window=window)
        return out.transpose(1, 2).flatten(0, 1)
    rows, outs = [], []
    for (length, num_keys), starts in groups.items():
        of_queries, of_keys = ([pair[side] for pair in starts] for side in (0, 1))
        parts = ((query, of_queries, length), (key, of_keys, num_keys), (value, of_keys, num_keys))
        stacked = (_stacked(*part) for part in parts)
        outs.append(_sdpa(*stacked, scale=scale, window=window).transpose(1, 2).flatten(0, 1))
        rows += [torch.arange(start, start + length) for start in of_queries]
    # index_copy and index_select have gradients without a scatter of duplicates, which is slow on the CPU.
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    return out.index_copy(0, torch.cat(rows).to(query.device), torch.cat(outs))


def _stacked(x: torch.Tensor, starts: list[int], length: int) -> torch.Tensor:
    """Rows of a pack, `length` from each start: [t, h, d] -> [starts, h, length, d]."""
    if len(starts) == 1:
        return x[starts[0] : starts[0] + length].unsqueeze(0).transpose(1, 2)
    rows = (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(x.device)
    return x.index_select(0, rows).unflatten(0, (-1, length)).transpose(1, 2)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """[n, h, s, d], [n, g, u, d] and [n, g, u, e] -> [n, h, s, e]; with fewer queries than keys they are the last."""
    is_grouped = query.shape[1] != key.shape[1]
    before = key.shape[2] - query.shape[2]
    mask = None
    if before or window is not None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
        mask = mask if window is None else mask.triu(before - window + 1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: Sequence[torch.Tensor],
    longest: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """torch's flash attention over a pack; shapes as in `attend_packed`, the pairs are of (queries, keys).

    With fewer queries than keys it takes them as the last ones.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1  # beside the query itself; -1 is no limit; nothing to the right
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if "enable_gqa" in _parameters(varlen_attn):  # torch 2.11 groups heads without being told
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    narrower = query.shape[-1] - value.shape[-1]  # of latent attention: the kernel has one width for all three
    if narrower:  # without, it would be a copy
        value = F.pad(value, (0, narrower))
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    out = varlen_attn(q, k, v, *cu_seqlens, *longest, **options)
    return out[..., : out.shape[-1] - narrower] if narrower else out


# ---- latent attention


class LatentAttention(MLASelfAttention):
    """Megatron's, with the gradient of the shared part of the keys summed over tensor-parallel ranks.

    Every head sees the same rotated part of the key (arXiv:2405.04434). Megatron (0.16.1) cuts the projection that
    makes it over the ranks and gathers its output with a gradient that keeps what a rank's own heads say, where the
    sum over all ranks' heads is needed.

    The projection's output comes to Megatron as whole rows of this rank's part of the sequence. Then it gathers the
    shared part itself, over the sequence, and the gradient of that is a sum.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.tp_group.size() > 1 and self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_whole_rows)


def _whole_rows(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """[s, b, width / TP] -> [s / TP, b, width]."""
    rows, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(rows)), bias
