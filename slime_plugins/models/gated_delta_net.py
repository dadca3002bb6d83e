"""Gated delta net (arXiv:2412.06464): the linear attention of Qwen3-Next and Qwen3.5, over packed sequences.

Megatron (0.16.1) has the layer, but not for packed sequences and only with flash-linear-attention. Here the rule is
FlashQLA's kernel where --qwen-gdn-backend asks for it, else flash-linear-attention's on CUDA where it is installed,
and Megatron's copy of transformers' torch implementation elsewhere. Neither the convolution nor the state of a
sequence reaches the next one of a pack. A rank of tensor parallelism has whole key heads with their value heads: the
projection's rows, and the convolution's channels, are those of key head 0, then of key head 1, ...
Under context parallelism every rank goes through the whole sequences, gathered from all ranks, for the states of its
own tokens: this layer takes the time and memory of whole sequences there, what is around it does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from slime.backends.megatron_utils.cp_utils import gather_pack, gathered_places, own_rows
from slime.backends.megatron_utils.layers.gathered_weights import wait_for_weights
from slime.backends.megatron_utils.layers.varlen_attention import cu_seqlens_of, host_ends, keep
from slime.utils import accelerator
from slime.utils.accelerator import to_device
from slime.utils.accelerator.fusion import fused_on_cuda

CHUNK = 64
"""Tokens that the torch implementation takes at a time; it pads sequences to a multiple."""
_LONG = "_slime_int64"
Rule = Callable[..., torch.Tensor]


@dataclass
class GatedDeltaNetSubmodules:
    """The two projections, cut over tensor-parallel ranks by rows and by columns."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedDeltaNet(MegatronModule):
    """Takes the place of self-attention in a layer: [s, b, H] -> [s, b, H], packed with b = 1."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        backend: str = "fla",
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.backend = backend
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        self.key_heads = config.linear_num_key_heads // ranks
        self.value_heads = config.linear_num_value_heads // ranks
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        values = config.linear_num_value_heads * self.value_dim
        keys = config.linear_num_key_heads * self.key_dim
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            2 * keys + 2 * values + 2 * config.linear_num_value_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.conv1d = _Channels(config, (2 * keys + values) // ranks)
        here = {"device": accelerator.current_device()}
        self.dt_bias = _cut(torch.ones(self.value_heads, **here), config)
        decay = torch.linspace(1, 16, config.linear_num_value_heads, **here).chunk(ranks)[self.tp_group.rank()]
        self.A_log = _cut(decay.log(), config)
        self.out_norm = _Scale(config, self.value_dim)
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s / TP, b, H] with sequence parallelism, else [s, b, H]; returns (the same shape, bias)."""
        rows, _ = self.in_proj(hidden_states)
        length, batch = rows.shape[:2]
        rows = rows.transpose(0, 1).flatten(0, 1)
        if packed_seq_params is None:
            cu_seqlens = torch.arange(batch + 1, device=rows.device) * length
        else:
            cu_seqlens = cu_seqlens_of(packed_seq_params)
        places = None
        if self.cp_group.size() > 1:
            if packed_seq_params is None:
                raise ValueError("a gated delta net under context parallelism needs packed_seq_params.")
            places = _places(packed_seq_params, self.cp_group.size())
        mixed = self._mix(rows, cu_seqlens, places)
        output, bias = self.out_proj(mixed.unflatten(0, (batch, length)).transpose(0, 1).contiguous())
        return output, bias

    def _mix(self, rows: torch.Tensor, cu_seqlens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """[t, rows of this rank] -> [t, value heads of this rank * channels].

        `places` says where the tokens of all context-parallel ranks belong; None where this one has all.
        """
        per_key = self.value_heads // self.key_heads
        values = per_key * self.value_dim
        by_head = rows.unflatten(-1, (self.key_heads, -1))
        qkv, z, b, a = by_head.split([2 * self.key_dim + values, values, per_key, per_key], -1)
        if places is not None:
            parts = (qkv, b, a)
            qkv, b, a = gather_pack(torch.cat(parts, -1), places, self.cp_group).split(
                [part.shape[-1] for part in parts], -1
            )
        wait_for_weights(self.conv1d, self.out_norm)
        qkv = causal_conv(qkv.flatten(1), self.conv1d.weight, cu_seqlens).unflatten(-1, (self.key_heads, -1))
        q, k, v = qkv.split([self.key_dim, self.key_dim, values], -1)
        q, k = (_l2_norm(part).repeat_interleave(per_key, 1) for part in (q, k))
        decay = -self.A_log.float().exp() * F.softplus(a.flatten(1).float() + self.dt_bias)
        rule = delta_rule_for(rows.device, self.backend)
        v = v.unflatten(-1, (per_key, self.value_dim)).flatten(1, 2)
        out = rule(q, k, v, decay, b.flatten(1).sigmoid(), cu_seqlens)
        if places is not None:
            out = own_rows(out, places, self.cp_group)
        # Every rank has other heads, and all scale with the same weight: its gradient is the sum over the ranks.
        scale = copy_to_tensor_model_parallel_region(self.out_norm.weight, self.tp_group)
        return _gated_norm(out, z.reshape(out.shape), scale, self.config.layernorm_epsilon).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, tp_group: Any = None
    ) -> dict[str, Any]:
        """What a distributed checkpoint holds; every cut is along dimension 0, whole key heads."""
        metadata, group = ensure_metadata_has_dp_cp_group(metadata), tp_group or self.tp_group
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        own["conv1d.weight"] = self.conv1d.weight
        cut = dict.fromkeys(own, 0)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, cut, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_norm", "out_proj"):
            module = self.get_submodule(name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return found


def _places(packed_seq_params: Any, cp_size: int) -> torch.Tensor:
    """`gathered_places` of a pack, on its device; kept with it, for every layer asks the same."""

    def find() -> torch.Tensor:
        places = gathered_places(host_ends(packed_seq_params), cp_size)
        return to_device(places, cu_seqlens_of(packed_seq_params).device)

    return keep(packed_seq_params, "places", find)


class _Channels(torch.nn.Module):
    """The weights [channels, 1, kernel] of a convolution of each channel by itself, cut by channels."""

    def __init__(self, config: TransformerConfig, channels: int) -> None:
        super().__init__()
        kernel = config.linear_conv_kernel_dim
        start = torch.full((channels, 1, kernel), 1 / kernel, device=accelerator.current_device())
        self.weight = _cut(start, config)


class _Scale(torch.nn.Module):
    """The weights [channels] of a norm."""

    def __init__(self, config: TransformerConfig, channels: int) -> None:
        super().__init__()
        ones = torch.ones(channels, dtype=config.params_dtype, device=accelerator.current_device())
        self.weight = torch.nn.Parameter(ones)


def _cut(values: torch.Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """A parameter of which every tensor-parallel rank has another part, along dimension 0."""
    param = torch.nn.Parameter(values.to(config.params_dtype))
    set_tensor_model_parallel_attributes(param, True, 0, 1)
    return param


def causal_conv(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """SiLU of a causal convolution of each channel within each sequence: x [t, channels] -> the same shape.

    Args:
        x: the pack.
        weight: [channels, 1, kernel]; its last entry meets the token itself.
        cu_seqlens: where sequences start, and t at the end.
    """
    tokens = torch.arange(x.shape[0], device=x.device)
    position = tokens - cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)]
    return _conv(x, weight.squeeze(1), position)


@fused_on_cuda
def _conv(x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    kernel = weight.shape[1]
    total = x * weight[:, -1]
    for back in range(1, kernel):
        before = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        total = total + torch.where((position >= back)[:, None], before, 0) * weight[:, kernel - 1 - back]
    return F.silu(total)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@fused_on_cuda
def _gated_norm(x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """scale * RMSNorm(x) * silu(gate), with transformers' roundings."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (scale * normed * F.silu(gate.float())).to(x.dtype)


def delta_rule_for(device: torch.device, backend: str = "fla") -> Rule:
    """The implementation for tensors on `device`; `backend` as --qwen-gdn-backend has it.

    FlashQLA has no stand-in: who asks for it and cannot have it is refused when the command line is read.
    """
    if backend == "flashqla":
        return flashqla_delta_rule
    return fla_delta_rule if device.type == "cuda" and has_fla() else torch_delta_rule


def has_fla() -> bool:
    """Whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


def fla_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """flash-linear-attention's kernel; arguments as of `torch_delta_rule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (x.unsqueeze(0).contiguous() for x in (q, k, v, g, beta))
    out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=_in_int64(cu_seqlens))
    result: torch.Tensor = out.squeeze(0)
    return result


def _in_int64(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The same, once and for all: what fla reads from the GPU about a pack, it keeps with the tensor that it got."""
    if cu_seqlens.dtype == torch.int64:
        return cu_seqlens
    if not hasattr(cu_seqlens, _LONG):
        setattr(cu_seqlens, _LONG, cu_seqlens.long())
    found: torch.Tensor = getattr(cu_seqlens, _LONG)
    return found


def flashqla_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """FlashQLA's kernel (0.1.3); arguments as of `torch_delta_rule`, d and e 128, q, k and v of one 16-bit type.

    No sequence may be empty: how it cuts long ones over multiprocessors is worked out from the lengths, and kept for
    as long as the same tensor `cu_seqlens` comes, which every layer of a pack gets.
    """
    from flash_qla import chunk_gated_delta_rule

    q, k, v, g, beta = (x.unsqueeze(0).contiguous() for x in (q, k, v, g, beta))
    out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    result: torch.Tensor = out.squeeze(0)
    return result


def torch_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule within each sequence of a pack, in fp32.

    Sequences that the implementation would pad to the same length go through it as one batch; what is behind the end
    of a sequence changes nothing before it.

    Args:
        q, k: [t, h, d], of length 1.
        v: [t, h, e].
        g: [t, h], logarithm of the decay.
        beta: [t, h], strength of the update.
        cu_seqlens: where sequences start, and t at the end.

    Returns:
        [t, h, e].
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    ends = cu_seqlens.tolist()
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        if end > start:
            groups.setdefault(-(-(end - start) // CHUNK) * CHUNK, []).append((start, end))
    places, outs = [], []
    for length, spans in groups.items():
        longest = min(length, max(end - start for start, end in spans))
        steps = torch.arange(longest)
        inside = torch.stack([steps < end - start for start, end in spans])
        rows = torch.stack([(start + steps).clamp(max=end - 1) for start, end in spans]).to(q.device)
        out, _ = torch_chunk_gated_delta_rule(*(x[rows] for x in (q, k, v, g, beta)), chunk_size=CHUNK)
        where = inside.flatten().nonzero().squeeze(1).to(q.device)
        outs.append(out.flatten(0, 1).index_select(0, where))
        places.append(rows.flatten().index_select(0, where))
    return torch.zeros_like(v).index_copy(0, torch.cat(places), torch.cat(outs))
