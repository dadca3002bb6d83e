"""How HF tensors lie in one Megatron parameter, and how that parameter is cut over tensor-parallel ranks.

Everything works on full tensors and in both directions. Nothing here knows names, process groups, files or dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from slime.config.args import Args


def _concatenate(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch  # here, since a command line that names a family is checked without it

    return torch.cat(list(parts), dim)


@dataclass(frozen=True)
class TensorShape:
    """The numbers of a model that names and layouts need."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    linear_num_key_heads: int = 0
    """This and the three below: of layers with a gated delta net; 0 where the model has none."""
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0

    @classmethod
    def of(cls, args: Args) -> TensorShape:
        """Read them from derived flags."""
        return cls.of_saved(vars(args))

    @classmethod
    def of_saved(cls, numbers: Mapping[str, Any]) -> TensorShape:
        """Read them from attributes of derived flags; those of kinds of layers that the model lacks may be missing."""
        return cls(**{name: numbers[name] for name in cls.__dataclass_fields__ if numbers.get(name) is not None})


class Layout(Protocol):
    """How the HF tensors of one rule lie in one Megatron parameter; `to_hf` undoes `to_megatron` exactly."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """Full Megatron parameter -> HF tensors (may be views of it)."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """HF tensors -> full Megatron parameter."""

    def split(self, param: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
        """Full parameter -> the shares of the tensor-parallel ranks."""

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Shares of the tensor-parallel ranks -> full parameter."""


class Same:
    """One HF tensor, unchanged; cut in equal chunks."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[...] -> [[...]]."""
        return [param]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[[...]] -> [...]."""
        (tensor,) = tensors
        return tensor

    def split(self, param: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
        """Equal chunks along `dim`."""
        return list(param.chunk(num_parts, dim))

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Concatenate along `dim`."""
        return _concatenate(parts, dim)


class Vocab(Same):
    """Rows of the vocabulary, followed in Megatron by padding rows (zeros when loaded, dropped on export)."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[padded V, H] -> [[V, H]]."""
        return [param[: shape.vocab_size]]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[[V, H]] -> [padded V, H]."""
        (tensor,) = tensors
        padding = tensor.new_zeros(shape.padded_vocab_size - tensor.shape[0], *tensor.shape[1:])
        return _concatenate([tensor, padding])


class Qkv(Same):
    """q, k and v of each query group after one another; weights [rows, H] and biases [rows] alike."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[(heads + 2 groups) * channels, ...] -> [q, k, v]."""
        groups = shape.num_query_groups
        order = _heads_of_q_k_v(shape.num_attention_heads, groups, param.device)
        # One kernel; a copy of each of q, k and v takes three, which is a tenth of a weight sync of a small model.
        by_head = param.reshape(len(order), -1).index_select(0, order).view_as(param)
        return list(by_head.split_with_sizes([groups * rows for rows in self._rows(shape)]))

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[q, k, v] -> [(heads + 2 groups) * channels, ...]."""
        rows = self._rows(shape)
        grouped = [t.unflatten(0, (shape.num_query_groups, n)) for t, n in zip(tensors, rows, strict=True)]
        return _concatenate(grouped, dim=1).flatten(0, 1)

    @staticmethod
    def _rows(shape: TensorShape) -> list[int]:
        """Rows of q, k and v in one query group."""
        heads_per_group = shape.num_attention_heads // shape.num_query_groups
        return [heads_per_group * shape.kv_channels, shape.kv_channels, shape.kv_channels]


@functools.lru_cache(maxsize=16)
def _heads_of_q_k_v(num_heads: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """[heads + 2 groups] where the heads of q, then those of k, then those of v are among Megatron's."""
    import torch

    places = torch.arange(num_heads + 2 * num_groups, device=device).view(num_groups, -1)
    return torch.cat([places[:, :-2].flatten(), places[:, -2], places[:, -1]])


class GatedQkv(Qkv):
    """q, its gates, k and v of each query group after one another; HF has the gate of a head behind the head's q."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[(2 heads + 2 groups) * channels, ...] -> [q with gates [2 heads * channels, ...], k, v]."""
        rows = self._rows(shape)
        grouped = param.view(shape.num_query_groups, sum(rows) + rows[0], *param.shape[1:])
        q, gate, k, v = grouped.split_with_sizes([rows[0], *rows], 1)
        heads = [part.unflatten(1, (-1, shape.kv_channels)) for part in (q, gate)]
        return [_concatenate(heads, dim=2).flatten(0, 2), k.flatten(0, 1), v.flatten(0, 1)]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[q with gates, k, v] -> [(2 heads + 2 groups) * channels, ...]."""
        with_gates, k, v = tensors
        heads = with_gates.unflatten(0, (shape.num_query_groups, -1, 2, shape.kv_channels))
        grouped = [heads[:, :, 0].flatten(1, 2), heads[:, :, 1].flatten(1, 2)]
        grouped += [part.unflatten(0, (shape.num_query_groups, shape.kv_channels)) for part in (k, v)]
        return _concatenate(grouped, dim=1).flatten(0, 1)


def _delta_net_rows(shape: TensorShape) -> tuple[int, int, int]:
    """(channels of a key head, those of its value heads, its value heads)."""
    values = shape.linear_num_value_heads // shape.linear_num_key_heads
    return shape.linear_key_head_dim, values * shape.linear_value_head_dim, values


class DeltaNetRows(Same):
    """What a gated delta net projects its input to: q, k, v, z, b and a of each key head after one another.

    HF (Qwen3-Next) has the same in two tensors, one of q, k, v and z and one of b and a.
    """

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[key heads * rows, H] -> [qkvz, ba]."""
        key, value, values = _delta_net_rows(shape)
        by_head = param.view(shape.linear_num_key_heads, -1, *param.shape[1:])
        return [part.flatten(0, 1) for part in by_head.split_with_sizes([2 * key + 2 * value, 2 * values], 1)]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[qkvz, ba] -> [key heads * rows, H]."""
        return _concatenate([t.unflatten(0, (shape.linear_num_key_heads, -1)) for t in tensors], 1).flatten(0, 1)


class DeltaNetRowsApart(Same):
    """The same rows, of which HF (Qwen3.5) has all q, then all k, then all v in one tensor, z, b and a in three."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[key heads * rows, H] -> [qkv, z, b, a]."""
        key, value, values = _delta_net_rows(shape)
        by_head = param.view(shape.linear_num_key_heads, -1, *param.shape[1:])
        sizes = [key, key, value, value, values, values]
        q, k, v, *others = (part.flatten(0, 1) for part in by_head.split_with_sizes(sizes, 1))
        return [_concatenate([q, k, v]), *others]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[qkv, z, b, a] -> [key heads * rows, H]."""
        qkv, *others = tensors
        parts = [*_of_all_heads(qkv, shape), *others]
        return _concatenate([t.unflatten(0, (shape.linear_num_key_heads, -1)) for t in parts], 1).flatten(0, 1)


class DeltaNetConv(Same):
    """The convolution's channels: q, k and v of each key head after one another; HF has all q, all k and all v."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[channels, 1, kernel] -> [[channels, 1, kernel]]."""
        key, value, _ = _delta_net_rows(shape)
        by_head = param.view(shape.linear_num_key_heads, -1, *param.shape[1:])
        return [_concatenate([part.flatten(0, 1) for part in by_head.split_with_sizes([key, key, value], 1)])]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[[channels, 1, kernel]] -> [channels, 1, kernel]."""
        (tensor,) = tensors
        parts = _of_all_heads(tensor, shape)
        return _concatenate([t.unflatten(0, (shape.linear_num_key_heads, -1)) for t in parts], 1).flatten(0, 1)


def _of_all_heads(qkv: torch.Tensor, shape: TensorShape) -> tuple[torch.Tensor, ...]:
    """All q, all k and all v of a tensor that has them after one another."""
    key, value, _ = _delta_net_rows(shape)
    heads = shape.linear_num_key_heads
    return qkv.split_with_sizes([heads * key, heads * key, heads * value], 0)


class GateUp(Same):
    """The gate rows, then the up rows; each half is cut by itself, so that a rank has matching rows of both."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[2 F, H] -> [gate [F, H], up [F, H]]."""
        return list(param.chunk(2, 0))

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[gate, up] -> [2 F, H]."""
        return _concatenate(tensors)

    def split(self, param: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
        """Each rank's [gate share, up share]."""
        halves = [half.chunk(num_parts, dim) for half in param.chunk(2, dim)]
        return [_concatenate(pair, dim) for pair in zip(*halves, strict=True)]

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """All gate shares, then all up shares."""
        halves = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return _concatenate([share for half in halves for share in half], dim)


class GateUpTogether(GateUp):
    """The same rows where the HF model, too, has gate and up in one tensor (GLM-4)."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[2 F, H] -> [[2 F, H]]."""
        return [param]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[[2 F, H]] -> [2 F, H]."""
        (tensor,) = tensors
        return tensor


class SwappedHalves(Same):
    """The two halves of the columns, the other way around: what multiplies [a, b] here multiplies [b, a] in HF."""

    def to_hf(self, param: torch.Tensor, shape: TensorShape) -> list[torch.Tensor]:
        """[H, 2 H] -> [[H, 2 H]]."""
        return [_concatenate(param.chunk(2, 1)[::-1], dim=1)]

    def to_megatron(self, tensors: Sequence[torch.Tensor], shape: TensorShape) -> torch.Tensor:
        """[[H, 2 H]] -> [H, 2 H]."""
        (tensor,) = tensors
        return _concatenate(tensor.chunk(2, 1)[::-1], dim=1)
