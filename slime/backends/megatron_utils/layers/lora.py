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

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_cuda_rng_tracker,
    mappings,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.layers.value_head import is_of_head, value_head_of
from slime.backends.megatron_utils.model.model_weights import (
    ADAPTER,
    is_of_adapter,
    is_tied_copy,
    iter_weights,
    num_copies,
)
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.args import Args
from slime.config.megatron.lora_plan import LoraPlan, served_plan
from slime.models.families import family_of_args
from slime.training.adapters import (
    AdapterSource,
    compare_base,
    draw_a,
    peft_config,
    refuse_adapters_alone,
    take_adapter,
    write_adapter,
)
from slime.utils.distributed_utils import gathered, get_gloo_group
from slime.utils.errors import UsageError
from slime.weights.adapters import PEFT_PREFIX

logger = logging.getLogger(__name__)


class Adapter(torch.nn.Module):
    """The low-rank path of one linear layer; returns what is added to the layer's output.

    Args:
        base: the layer. name: of it, in the whole model; seeds A, so that every layout starts from the same values.
        plan: rank and scale.
        projections: HF's names of the parts of the layer's output. sizes: this rank's rows of each.
        groups: query groups on this rank, over which the parts are interleaved; 0 = one part after the other.
        seed: of the run.
    """

    def __init__(
        self,
        base: Any,
        *,
        name: str,
        plan: LoraPlan,
        projections: Sequence[str],
        sizes: Sequence[int],
        groups: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.projections, self.rank, self.scale, self.groups = tuple(projections), plan.rank, plan.scale, groups
        self.dropout, self.draws_gaussian = plan.dropout, plan.init == "gaussian"
        self.is_row, self.is_expert = isinstance(base, RowParallelLinear), bool(base.is_expert)
        self.sequence_parallel: bool = base.config.sequence_parallel and not self.is_expert
        self.group: dist.ProcessGroup = base.tp_group
        weight = base.weight
        drawn = [self._drawn(weight.shape[1], f"{seed}/{name}/{projection}") for projection in projections]
        self.lora_A = torch.nn.Parameter(torch.cat(drawn).to(weight))
        self.lora_B = torch.nn.ParameterList(torch.nn.Parameter(weight.new_zeros(rows, plan.rank)) for rows in sizes)
        self._say_how_they_are_cut()
        for parameter in self.parameters():
            parameter.allreduce = getattr(weight, "allreduce", True)  # over the ranks that have the same expert

    def _drawn(self, columns: int, seed: str) -> torch.Tensor:
        """This rank's columns of one A [rank, in], which is drawn as PEFT draws it."""
        cuts = self.group.size() if self.is_row else 1
        whole = draw_a(self.rank, columns * cuts, seed=seed, is_gaussian=self.draws_gaussian)
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
        low = (self._low(x) * self.scale).split(self.rank, -1)  # here it is small
        return self._joined([part @ b.t() for part, b in zip(low, self.whole_b(), strict=True)], x.dim() - 1)

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
            yield projection, part, b.detach() if self.is_row else self._gathered(b)

    @torch.no_grad()
    def take(self, number: int, a: torch.Tensor, b: torch.Tensor, *, source: str) -> None:
        """Set this rank's share of one projection's A [rank, in] and B [out, rank].

        Raises:
            UsageError: they have other shapes.
        """
        rank, size = self.group.rank(), self.group.size()
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
        return found


class _WithAdapter:
    """What a linear layer does beside its own product; its class comes next in the order of bases."""

    lora: Adapter

    def forward(self, input_: torch.Tensor, *inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias = super().forward(input_, *inputs, **kwargs)  # type: ignore[misc]
        return output + self.lora(input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        own = {name: leaf for name, leaf in own.items() if not is_of_adapter(name)}
        return own | self.lora.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)


class _ColumnLinear(_WithAdapter, ColumnParallelLinear):
    pass


class _RowLinear(_WithAdapter, RowParallelLinear):
    pass


def attach_adapters(args: Args, models: Sequence[torch.nn.Module]) -> None:
    """Freeze the model and give its linear layers the adapters of the flags; without --lora-rank it changes nothing.

    Args:
        args: derived flags.
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare, before they are wrapped for data parallelism.
    """
    plan = LoraPlan.of(args)
    if plan is None:
        return
    if (args.bf16 or args.fp16) and served_plan(args) is None and dist.get_rank() == 0:
        logger.warning(
            "--lora-rank %d: engines get the adapters merged into 16-bit weights, and rounding takes a part of them; "
            "train/train_rollout_logprob_abs_diff shows how much (docs/lora.md)",
            plan.rank,
        )
    for model in models:
        bare = unwrap(model).requires_grad_(False)
        if head := value_head_of(model):
            head.requires_grad_(True)  # a critic's is trained as a whole, and saved with the adapters
        for name, module in _linears(bare, plan):
            _attach(module, plan, name, args.seed)


def _linears(model: torch.nn.Module, plan: LoraPlan) -> Iterator[tuple[str, Any]]:
    """The linear layers that the plan is about, by their names in the whole model."""
    bare = unwrap(model)
    first_expert = 0
    if plan.has_experts:
        here = bare.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = here * parallel_state.get_expert_model_parallel_rank()
    for layer in bare.decoder.layers:
        for name, module in layer.named_modules():
            if re.sub(r"(?<=local_experts\.)\d+", "{e}", name) in plan.projections:
                numbered = re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + first_expert), name)
                yield f"decoder.layers.{layer.layer_number - 1}.{numbered}", module  # Megatron counts from 1


def _attach(module: Any, plan: LoraPlan, name: str, seed: int) -> None:
    linear = re.sub(r"(?<=local_experts\.)\d+", "{e}", name.split(".", 3)[-1])
    projections, config = plan.projections[linear], module.config
    sizes, groups = [module.weight.shape[0] // len(projections)] * len(projections), 0
    if len(projections) == 3:
        groups = config.num_query_groups // module.tp_group.size()
        keys = config.kv_channels * groups
        sizes = [module.weight.shape[0] - 2 * keys, keys, keys]
    module.lora = Adapter(module, name=name, plan=plan, projections=projections, sizes=sizes, groups=groups, seed=seed)
    module.__class__ = _ColumnLinear if isinstance(module, ColumnParallelLinear) else _RowLinear


def has_adapters(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the model of this rank was built with adapters."""
    return any(isinstance(module, Adapter) for model in models for module in model.modules())


# ---- the base under them


def is_base(directory: Path, models: Sequence[torch.nn.Module]) -> bool:
    """Whether a checkpoint holds what is under the adapters of `models`, and not adapters.

    Raises:
        UsageError: it holds adapters, and the model has none.
    """
    is_of_adapters = refuse_adapters_alone(directory, has_adapters=has_adapters(models))
    return has_adapters(models) and not is_of_adapters


def base_checksum(models: Sequence[torch.nn.Module]) -> float:
    """The sum of the absolute values of all frozen weights, whatever the layout (collective)."""
    total = torch.zeros(1, dtype=torch.float64)
    for model in models:
        is_critic = value_head_of(model) is not None
        for weight in iter_weights(model):
            if not is_tied_copy(model, weight) and not (is_critic and is_of_head(weight.name)):
                total += float(torch.linalg.vector_norm(weight.tensor, 1, dtype=torch.float64)) / num_copies(weight)
    dist.all_reduce(total, group=get_gloo_group())
    return float(total)


def check_base(models: Sequence[torch.nn.Module], saved: float, source: Path) -> None:
    """Refuse adapters that were trained over another base than the model holds (collective).

    Args:
        models: with the base loaded.
        saved: the `base_checksum` of the checkpoint.
        source: the checkpoint, for the error.

    Raises:
        UsageError: the sums differ.
    """
    compare_base(base_checksum(models), saved, source)


# ---- PEFT


def save_adapter(args: Args, models: Sequence[torch.nn.Module] | AdapterSource, directory: Path) -> None:
    """Write the adapters as a PEFT directory, which `PeftModel.from_pretrained` loads; all ranks call it."""
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in adapter_tensors(args, models).items()}
    if dist.get_rank() == 0:
        write_adapter(tensors, peft_config(args), directory)


@torch.no_grad()
def adapter_tensors(args: Args, models: Sequence[torch.nn.Module] | AdapterSource) -> dict[str, torch.Tensor]:
    """PEFT's names -> whole tensors, on every rank (collective); some are those that are trained."""
    if not isinstance(models, Sequence):
        return models.adapter_tensors()
    plan = LoraPlan.of(args)
    assert plan is not None, "without --lora-rank there are no adapters"
    is_split = parallel_state.get_pipeline_model_parallel_world_size() > 1 or (
        plan.has_experts and parallel_state.get_expert_model_parallel_world_size() > 1
    )
    tensors: dict[str, torch.Tensor] = {}
    for names, adapter in _named_adapters(args, models):
        for name, (_, a, b) in zip(names, adapter.whole(), strict=True):
            if not is_split or _is_first_copy(adapter):
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    if not is_split:
        return tensors
    on_host = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    return {name: tensor for part in gathered(on_host) for name, tensor in part.items()}


def load_adapter(args: Args, models: Sequence[torch.nn.Module], directory: str | Path) -> None:
    """Give the adapters the values of a PEFT directory; arguments and errors of `take_adapter`."""
    take_adapter(_named_adapters(args, models), directory)


def _named_adapters(args: Args, models: Sequence[torch.nn.Module]) -> Iterator[tuple[list[str], Adapter]]:
    """Yield (PEFT's name of each projection, adapter) of the adapters of this rank."""
    plan, family = LoraPlan.of(args), family_of_args(args)
    assert plan is not None
    for model in models:
        for name, module in _linears(model, plan):
            hf_names = family.find(f"{name}.weight", args.num_layers)[1]
            yield [PEFT_PREFIX + hf_name.removesuffix(".weight") for hf_name in hf_names], module.lora


def _is_first_copy(adapter: Adapter) -> bool:
    """Whether no rank before this one has the same adapter."""
    if adapter.is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0 and adapter.group.rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0 and adapter.group.rank() == 0
