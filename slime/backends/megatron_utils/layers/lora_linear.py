"""LoRA adapters of Megatron's linear layers: y = W x + (alpha / rank) B A x, with W frozen.

Exact under tensor and sequence parallelism. A column-parallel layer has all of A on every rank and a share of B's
rows; a row-parallel one a share of A's columns and all of B. Only [tokens, rank] goes between ranks:

| layer | forward pass | backward pass | gradients |
|---|---|---|---|
| column | nothing | sum of dU | whole on every rank |
| column, sequence parallel | gather U | reduce-scatter dU | of A: of a rank's tokens, summed by Megatron |
| row | sum of U | nothing | whole on every rank |
| row, sequence parallel | reduce-scatter U | gather dU | of B: of a rank's tokens, summed by Megatron |

Experts have adapters of their own. Their tokens are gathered, and their outputs summed, by Megatron's dispatcher, so
that adapters cut over expert tensor parallelism sum the gradient of the half that is not cut, not tokens.

One Megatron weight holds several projections of HF (q, k, v; gate, up). Each has its own A and B, as PEFT trains them.
Names of the base's parameters do not change: the module gets another class and a child, `lora`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_cuda_rng_tracker,
    mappings,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.layers.gathered_weights import wait_for_weights
from slime.backends.megatron_utils.model.model_weights import ADAPTER, is_of_adapter
from slime.config.megatron.lora_plan import LoraPlan
from slime.training.adapters import draw_a
from slime.utils.errors import UsageError


class Adapter(torch.nn.Module):
    """The low-rank path of one linear layer; returns what is added to the layer's output.

    With several policies (--lora-policies) it is one of them at a time (`be`). The rows of A and columns of B beyond
    the rank of a policy are 0, and so are their gradients: they stay so.

    Args:
        base: the layer. weight: this rank's share of what it multiplies with, [out, in].
        name: of the layer, in the whole model; seeds A, so that every layout starts from the same values.
        plan: rank and scale.
        projections: HF's names of the parts of the layer's output. sizes: this rank's rows of each.
        groups: query groups on this rank, over which the parts are interleaved; 0 = one part after the other.
        seed: of the run.
        peft_names: of each projection, in the whole model.
        num_rows: of B in the whole model, of an output layer: what is behind them is padding, and stays 0.
    """

    def __init__(
        self,
        base: Any,
        weight: torch.Tensor,
        *,
        name: str,
        plan: LoraPlan,
        projections: Sequence[str],
        sizes: Sequence[int],
        groups: int,
        seed: int,
        peft_names: Sequence[str],
        num_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.peft_names = tuple(peft_names)
        self.projections, self.rank, self.scale, self.groups = tuple(projections), plan.rank, plan.scale, groups
        self.dropout, self.draws_gaussian = plan.dropout, plan.init == "gaussian"
        self._name, self._live_rank, self._num_rows = name, plan.rank, num_rows
        self.is_row, self.is_expert = isinstance(base, RowParallelLinear), bool(base.is_expert)
        self.sequence_parallel: bool = base.config.sequence_parallel and not self.is_expert
        self.group: dist.ProcessGroup = base.tp_group
        self.lora_A = torch.nn.Parameter(self._all_drawn(weight.shape[1], str(seed)).to(weight))
        self.lora_B = torch.nn.ParameterList(torch.nn.Parameter(weight.new_zeros(rows, plan.rank)) for rows in sizes)
        self._say_how_they_are_cut()
        for parameter in self.parameters():
            parameter.allreduce = getattr(weight, "allreduce", True)  # over the ranks that have the same expert

    @torch.no_grad()
    def be(self, plan: LoraPlan, *, seed: str | None) -> None:
        """Be the adapter of another policy.

        Args:
            plan: its rank, which is this one's at most, and its scale.
            seed: draws A anew, and sets B to 0; None leaves the values.
        """
        self.scale, self._live_rank = plan.scale, plan.rank
        if seed is not None:
            self.lora_A.copy_(self._all_drawn(self.lora_A.shape[1], seed))
            for b in self.lora_B:
                b.zero_()

    def _all_drawn(self, columns: int, seed: str) -> torch.Tensor:
        """This rank's columns of A of all projections."""
        drawn = [self._drawn(columns, f"{seed}/{self._name}/{projection}") for projection in self.projections]
        return torch.cat([torch.nn.functional.pad(a, (0, 0, 0, self.rank - len(a))) for a in drawn])

    def _drawn(self, columns: int, seed: str) -> torch.Tensor:
        """This rank's columns of one A [rank, in], which is drawn as PEFT draws it."""
        cuts = self.group.size() if self.is_row else 1
        whole = draw_a(self._live_rank, columns * cuts, seed=seed, is_gaussian=self.draws_gaussian)
        return whole.chunk(cuts, 1)[self.group.rank() if self.is_row else 0]

    def _say_how_they_are_cut(self) -> None:
        """Megatron reads it: what is cut counts on every rank in the gradient norm, what is not counts once."""
        cut, whole = ([self.lora_A], [*self.lora_B]) if self.is_row else ([*self.lora_B], [self.lora_A])
        if self.is_expert and self.group.size() == 1:  # no rank has another's: each counts, as the base's weights do
            cut, whole = [*cut, *whole], []
        for parameter in cut:
            set_tensor_model_parallel_attributes(parameter, True, self._cut_dim, 1)
        for parameter in whole:
            parameter.sequence_parallel = self.sequence_parallel

    @property
    def _cut_dim(self) -> int:
        return 1 if self.is_row else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s (/ TP), b, in (/ TP)], as the layer gets it -> [s (/ TP), b, out (/ TP)], as it returns."""
        low = self.low(x).split(self.rank, -1)
        return self._joined([part @ b.t() for part, b in zip(low, self.whole_b(), strict=True)], x.dim() - 1)

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part of x to the layer's output, in its memory where nothing has to go between ranks."""
        wait_for_weights(self, self.lora_B)
        if self.group.size() > 1 or self.is_expert or (self.dropout and self.training):
            if self._num_rows is not None:  # logits are the largest tensor of a step: there is none beside them
                return output.add_(self(x))
            return output + self(x)
        return cast(torch.Tensor, _Added.apply(output, x, self.lora_A, self.scale, self.groups, *self.lora_B))

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """Scale A x, of all projections: [s, b, rank] of all tokens, whatever the layer gets of them."""
        return self._low(x) * self.scale  # here it is small

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        """A x, of all projections."""
        if self.dropout and self.training:
            x = self._thinned(x)
        low = x @ self.whole_a().t()
        if self.is_expert:
            return low
        if self.is_row:
            reduce = mappings.reduce_scatter_to_sequence_parallel_region
            return (reduce if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region)(
                low, group=self.group
            )
        gather = mappings.gather_from_sequence_parallel_region
        return (gather if self.sequence_parallel else mappings.copy_to_tensor_model_parallel_region)(
            low, group=self.group
        )

    def _thinned(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout; ranks that have the same inputs draw the same mask."""
        if self.is_row or self.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return torch.nn.functional.dropout(x, self.dropout)
        return torch.nn.functional.dropout(x, self.dropout)

    def whole_a(self) -> torch.Tensor:
        """A of all projections, as the forward pass multiplies with it."""
        return self.lora_A if self.is_row else self._summed(self.lora_A)

    def whole_b(self) -> list[torch.Tensor]:
        """B of each projection, as the forward pass multiplies with it."""
        return [self._summed(b) if self.is_row else b for b in self.lora_B]

    def _summed(self, parameter: torch.Tensor) -> torch.Tensor:
        """The half that is not cut; an expert's gets its gradient from all ranks that share the expert."""
        if self.is_expert and self.group.size() > 1:
            return mappings.copy_to_tensor_model_parallel_region(parameter, group=self.group)
        return parameter

    def _joined(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Outputs of the projections, along `dim`, in the order of the layer's rows."""
        if len(parts) == 1:
            return parts[0]
        if not self.groups:
            return torch.cat(list(parts), dim)
        return torch.cat([part.unflatten(dim, (self.groups, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's share of W + (alpha / rank) B A, computed in fp32, in W's dtype."""
        pairs = zip(self.lora_A.detach().split(self.rank), self.lora_B, strict=True)
        products = [b.detach().float() @ a.float() for a, b in pairs]
        return (weight.detach().float() + self.scale * self._joined(products, 0)).to(weight.dtype)

    def whole(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (projection, A [rank, in], B [out, rank]) of the whole model (collective over tensor parallelism)."""
        a = self._gathered(self.lora_A) if self.is_row else self.lora_A.detach()
        for projection, part, b in zip(self.projections, a.split(self.rank), self.lora_B, strict=True):
            whole = (b.detach() if self.is_row else self._gathered(b))[: self._num_rows]
            if self._live_rank < self.rank:
                part, whole = part[: self._live_rank], whole[:, : self._live_rank]
            yield projection, part, whole

    @torch.no_grad()
    def take(self, number: int, a: torch.Tensor, b: torch.Tensor, *, source: str) -> None:
        """Set this rank's share of one projection's A [rank, in] and B [out, rank].

        Raises:
            UsageError: they have other shapes.
        """
        rank, size = self.group.rank(), self.group.size()
        if self._num_rows is not None:
            b = torch.nn.functional.pad(b, (0, 0, 0, size * len(self.lora_B[number]) - self._num_rows))
        shares = [a.chunk(size, 1)[rank], b] if self.is_row else [a, b.chunk(size, 0)[rank]]
        places = [self.lora_A.split(self.rank)[number], self.lora_B[number]]
        for share, place in zip(shares, places, strict=True):
            if share.shape != place.shape:
                raise UsageError(
                    f"{source} has A {tuple(a.shape)} and B {tuple(b.shape)}, which do not fit the model."
                )
            place.copy_(share)

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.group.size() == 1:
            return parameter.detach()
        parts = [torch.empty_like(parameter) for _ in range(self.group.size())]
        dist.all_gather(parts, parameter.detach().contiguous(), group=self.group)
        return torch.cat(parts, self._cut_dim)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the tensors, for checkpoints of any layout."""
        cut = ["lora_A"] if self.is_row else [f"lora_B.{number}" for number in range(len(self.projections))]
        tensors = self.state_dict(prefix="", keep_vars=True)
        axes = dict.fromkeys(cut, self._cut_dim)
        groups: dict[str, Any] = {"tp_group": self.group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets, **groups)
        for name in cut if self._num_rows is not None else ():
            found[f"{prefix}{name}"].allow_shape_mismatch = True  # another layout has other padding
        return found


class _Added(torch.autograd.Function):
    """output [..., out] += scale x A^T B^T, of every projection's rows, in place and by itself.

    The same of torch's own functions goes over [tokens, out] four times more, and short micro-batches wait for the
    host, which has three times as many calls to make then.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, x: torch.Tensor, a: torch.Tensor, scale: float, groups: int, *bs: torch.Tensor
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        low = (rows @ a.t()).mul_(scale)
        ctx.save_for_backward(rows, a, low, *bs)
        ctx.scale, ctx.groups, ctx.shape = scale, groups, x.shape
        for place, part, b in zip(_parts(output, groups, bs), low.chunk(len(bs), 1), bs, strict=True):
            if groups:
                place.add_((part @ b.t()).unflatten(1, (groups, -1)))
            else:
                place.addmm_(part, b.t())
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, a, low, *bs = ctx.saved_tensors
        of_parts = [part.flatten(1) for part in _parts(grads[0].contiguous(), ctx.groups, bs)]
        of_low = torch.cat([grad @ b for grad, b in zip(of_parts, bs, strict=True)], 1).mul_(ctx.scale)
        of_bs = [grad.t() @ part for grad, part in zip(of_parts, low.chunk(len(bs), 1), strict=True)]
        of_x = (of_low @ a).view(ctx.shape) if ctx.needs_input_grad[1] else None
        return grads[0], of_x, of_low.t() @ rows, None, None, *of_bs


def _parts(output: torch.Tensor, groups: int, bs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a layer's output: [tokens, rows] of each projection, or [tokens, groups, rows of one of them]."""
    flat = output.view(-1, output.shape[-1])
    return (flat.unflatten(1, (groups, -1)) if groups else flat).split([len(b) // (groups or 1) for b in bs], -1)


class _WithAdapter:
    """Adds an adapter's product to that of a linear layer, whose class is the next base."""

    lora: Adapter

    def forward(self, input_: torch.Tensor, *inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias = super().forward(input_, *inputs, **kwargs)  # type: ignore[misc]
        return self.lora.add_to(output, input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        own = {name: leaf for name, leaf in own.items() if not is_of_adapter(name)}
        return own | self.lora.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)


class ColumnLinear(_WithAdapter, ColumnParallelLinear):
    """A column-parallel layer with an adapter."""


class RowLinear(_WithAdapter, RowParallelLinear):
    """A row-parallel layer with an adapter."""
