"""LoRA adapters of Megatron's linear layers: y = W x + (alpha / rank) B A x, with W frozen.

Exact under tensor and sequence parallelism. A column-parallel layer has all of A on every rank and a share of B's
rows; a row-parallel one a share of A's columns and all of B. Only [tokens, rank] goes between ranks:

| layer | forward pass | backward pass | gradients |
|---|---|---|---|
| column | nothing | sum of dU | whole on every rank |
| column, sequence parallel | gather U | reduce-scatter dU | of A: of a rank's tokens, summed by Megatron |
| row | sum of U | nothing | whole on every rank |
| row, sequence parallel | reduce-scatter U | gather dU | of B: of a rank's tokens, summed by Megatron |

One Megatron weight holds several projections of HF (q, k, v; gate, up). Each has its own A and B, as PEFT trains them.
Names of the base's parameters do not change: the module gets another class and a child, `lora`.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    mappings,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import save_file

from slime.backends.megatron_utils.model.model_weights import ADAPTER, is_of_adapter, iter_weights
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.args import Args
from slime.config.megatron.lora_plan import PROJECTIONS, LoraPlan, base_of, plan_in, served_plan
from slime.models.families import family_of_args
from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)
NO_MODEL = "its run writes merged models with --save-hf"
ADAPTER_DIR = "adapter"
"""The PEFT directory in a checkpoint."""
_BASE_TOLERANCE = 1e-9
"""Relative; sums in fp64 that differ only in the order of their terms agree to 1e-13."""


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
        self.is_row = isinstance(base, RowParallelLinear)
        self.sequence_parallel: bool = base.config.sequence_parallel
        self.group: dist.ProcessGroup = base.tp_group
        weight = base.weight
        drawn = [self._drawn(weight.shape[1], f"{seed}/{name}/{projection}") for projection in projections]
        self.lora_A = torch.nn.Parameter(torch.cat(drawn).to(weight))
        self.lora_B = torch.nn.ParameterList(torch.nn.Parameter(weight.new_zeros(rows, plan.rank)) for rows in sizes)
        self._say_how_they_are_cut()

    def _drawn(self, columns: int, seed: str) -> torch.Tensor:
        """This rank's columns of one A [rank, in], which is drawn as PEFT draws it (Kaiming, uniform)."""
        cuts = self.group.size() if self.is_row else 1
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        whole = torch.empty(self.rank, columns * cuts).uniform_(-1, 1, generator=generator)
        return whole.chunk(cuts, 1)[self.group.rank() if self.is_row else 0] / math.sqrt(columns * cuts)

    def _say_how_they_are_cut(self) -> None:
        """Megatron reads it: what is cut counts on every rank in the gradient norm, what is not counts once."""
        cut, whole = ([self.lora_A], [*self.lora_B]) if self.is_row else ([*self.lora_B], [self.lora_A])
        for parameter in cut:
            set_tensor_model_parallel_attributes(parameter, True, self._cut_dim, 1)
        for parameter in whole:
            parameter.sequence_parallel = self.sequence_parallel

    @property
    def _cut_dim(self) -> int:
        return 1 if self.is_row else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s (/ TP), b, in (/ TP)], as the layer gets it -> [s (/ TP), b, out (/ TP)], as it returns."""
        low = x @ self.lora_A.t()
        if self.is_row:
            reduce = mappings.reduce_scatter_to_sequence_parallel_region
            low = (reduce if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region)(
                low, group=self.group
            )
        else:
            gather = mappings.gather_from_sequence_parallel_region
            low = (gather if self.sequence_parallel else mappings.copy_to_tensor_model_parallel_region)(
                low, group=self.group
            )
        parts = [part @ b.t() for part, b in zip(low.split(self.rank, -1), self.lora_B, strict=True)]
        return self._joined(parts, x.dim() - 1) * self.scale

    def _joined(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Outputs of the projections, along `dim`, in the order of the layer's rows."""
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

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor:
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
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets)
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
        return own | self.lora.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets)


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
        for layer in bare.decoder.layers:
            number = layer.layer_number - 1  # Megatron counts from 1
            for linear in plan.linears:
                _attach(layer.get_submodule(linear), plan, f"decoder.layers.{number}.{linear}", args.seed)


def _attach(module: Any, plan: LoraPlan, name: str, seed: int) -> None:
    projections, config = PROJECTIONS[name.split(".", 3)[-1]], module.config
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
    saved = plan_in(directory)
    if saved is not None and not has_adapters(models):
        raise UsageError(f"{directory} holds LoRA adapters alone (rank {saved['rank']}), not a model; {NO_MODEL}.")
    return has_adapters(models) and saved is None


def base_checksum(models: Sequence[torch.nn.Module]) -> float:
    """The sum of the absolute values of all weights under the adapters, whatever the layout (collective)."""
    group = parallel_state.get_tensor_model_parallel_group()
    total: Any = 0.0
    for weight in (weight for model in models for weight in iter_weights(model)):
        norm = torch.linalg.vector_norm(weight.tensor, 1, dtype=torch.float64)
        total = total + (norm if weight.partition_dim is not None else norm / group.size())
    dist.all_reduce(total, group=group)
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
    ours = base_checksum(models)
    if abs(ours - saved) > _BASE_TOLERANCE * abs(saved):
        raise UsageError(
            f"{source} holds adapters of another base than the one that was loaded (sum of absolute weights "
            f"{saved:.12g}, here {ours:.12g}); give the base of that run as --ref-load "
            "(or as --hf-checkpoint, if it had no --ref-load)."
        )


# ---- PEFT


def save_adapter(args: Args, models: Sequence[torch.nn.Module], directory: Path) -> None:
    """Write the adapters as a PEFT directory, which `PeftModel.from_pretrained` loads; all ranks call it."""
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in adapter_tensors(args, models).items()}
    if dist.get_rank() == 0:
        write_adapter(tensors, peft_config(args), directory)


def write_adapter(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], directory: Path) -> None:
    """Make a PEFT directory of tensors on the host and their adapter_config.json."""
    directory.mkdir()
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def adapter_tensors(args: Args, models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """PEFT's names -> whole tensors, on every rank (collective); some are those that are trained."""
    plan = LoraPlan.of(args)
    assert plan is not None, "without --lora-rank there are no adapters"
    family, tensors = family_of_args(args), dict[str, torch.Tensor]()
    for model in models:
        for layer in unwrap(model).decoder.layers:
            for linear in plan.linears:
                name = f"decoder.layers.{layer.layer_number - 1}.{linear}.weight"
                hf_names = family.find(name, args.num_layers)[1]
                adapter: Adapter = layer.get_submodule(linear).lora
                for hf_name, (_, a, b) in zip(hf_names, adapter.whole(), strict=True):
                    stem = f"base_model.model.{hf_name.removesuffix('.weight')}"
                    tensors[f"{stem}.lora_A.weight"] = a
                    tensors[f"{stem}.lora_B.weight"] = b
    return tensors


def peft_config(args: Args) -> dict[str, Any]:
    """The adapter_config.json of the run's adapters."""
    plan = LoraPlan.of(args)
    assert plan is not None, "without --lora-rank there are no adapters"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_of(args),
        "r": plan.rank,
        "lora_alpha": plan.alpha,
        "target_modules": list(plan.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
