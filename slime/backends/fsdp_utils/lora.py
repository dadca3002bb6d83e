"""LoRA adapters of a sharded policy: y = W x + (alpha / rank) B A x, W frozen; plan, start and names are Megatron's.

Names of the base's parameters do not change: a linear layer gets another class and two parameters, whose rows are
sharded as all others are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.optimizer import local, local_rows, sharded_as
from slime.config.args import Args
from slime.config.megatron.lora_plan import LoraPlan
from slime.models.families import OUTPUT_LAYER, family_of_args
from slime.training.adapters import draw_a
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import UsageError

HALVES = ("lora_A", "lora_B")


class LoraLinear(torch.nn.Linear):
    """A linear layer of transformers with an adapter."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    plan: LoraPlan
    seed: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return super().forward(x) + torch.nn.functional.linear(self.low(x), self.lora_B)

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """Scale A x, [..., rank]."""
        share = self.plan.dropout
        thinned = torch.nn.functional.dropout(x, share, self.training) if share else x
        return torch.nn.functional.linear(thinned, self.lora_A) * self.plan.scale  # here it is small

    @torch.no_grad()
    def start(self) -> None:
        """Draw A as PEFT does; B is 0, so that the model is the base."""
        whole = draw_a(*self.lora_A.shape, seed=self.seed, is_gaussian=self.plan.init == "gaussian")
        self.take(0, whole, torch.zeros(self.lora_B.shape), source="the start")

    @torch.no_grad()
    def take(self, number: int, a: torch.Tensor, b: torch.Tensor, *, source: str) -> None:
        """Set this rank's rows of A [rank, in] and B [out, rank]; arguments as of Megatron's adapters.

        Raises:
            UsageError: they have other shapes.
        """
        del number  # there is one projection
        for value, parameter in ((a, self.lora_A), (b, self.lora_B)):
            if value.shape != parameter.shape:
                raise UsageError(f"{source} has {tuple(value.shape)}, where the model has {tuple(parameter.shape)}.")
            rows, first = local_rows(parameter)
            rows.copy_(value[first : first + len(rows)])

    def merged(self) -> torch.Tensor:
        """W + (alpha / rank) B A, sharded as W is (collective)."""
        a = self.lora_A.full_tensor() if isinstance(self.lora_A, DTensor) else self.lora_A
        return sharded_as(self.weight, local(self.weight) + self.plan.scale * (local(self.lora_B) @ a))


def attach_adapters(args: Args, hf: torch.nn.Module) -> None:
    """Freeze a model and give its linear layers adapters, on the meta device; without --lora-rank nothing changes.

    Raises:
        UsageError: the model has another kind of layer in a projection's place, or none.
    """
    plan = LoraPlan.of(args)
    if plan is None:
        return
    modules, found = dict(hf.requires_grad_(False).named_modules()), set()
    for name, seed in _planned(args, plan):
        module: Any = modules.get(name)
        if module is None:
            continue  # other layers of the model have it
        if type(module) is not torch.nn.Linear:
            raise UsageError(
                f"--lora-rank {plan.rank}: {name} is a {type(module).__name__}, for which --train-backend fsdp has no "
                "adapters; use --train-backend megatron."
            )
        found.add(name.rpartition(".")[2])
        module.__class__, module.plan, module.seed = LoraLinear, plan, seed
        module.lora_A = torch.nn.Parameter(torch.empty(plan.rank, module.in_features, device="meta"))
        module.lora_B = torch.nn.Parameter(torch.empty(module.out_features, plan.rank, device="meta"))
    if missing := [name for name in plan.target_modules if name not in found]:
        raise UsageError(
            f"--lora-rank {plan.rank}: {type(hf).__name__} has no {', '.join(missing)} where {args.hf_checkpoint} has "
            "it; use --train-backend megatron."
        )


def _planned(args: Args, plan: LoraPlan) -> Iterator[tuple[str, str]]:
    """(HF's name of a linear layer, what seeds its A: as Megatron's, so that both backends start from one adapter)."""
    family, num_layers = family_of_args(args), args.num_layers or 0
    for linear, projections in plan.projections.items():
        in_layers = [f"decoder.layers.{layer}.{linear}" for layer in range(num_layers)]
        for megatron in [linear] if linear == OUTPUT_LAYER else in_layers:
            hf_names = family.find(f"{megatron}.weight", num_layers)[1]
            for hf_name, projection in zip(hf_names, projections, strict=True):
                yield hf_name.removesuffix(".weight"), f"{args.seed}/{megatron}/{projection}"


def adapters_of(policy: torch.nn.Module) -> dict[str, LoraLinear]:
    """HF's name -> linear layer with an adapter."""
    named = policy.named_modules()
    return {name.removeprefix("hf."): module for name, module in named if isinstance(module, LoraLinear)}


def base_checksum(policy: torch.nn.Module) -> float:
    """The sum of the absolute values of all frozen weights, whatever the ranks (collective)."""
    total = torch.zeros(1, dtype=torch.float64)
    for parameter in policy.parameters():
        if not parameter.requires_grad and isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            shares = dist.get_world_size() // mesh.size(mesh.ndim - 1)  # ranks that have the same shard
            total += float(torch.linalg.vector_norm(local(parameter), 1, dtype=torch.float64)) / shares
    dist.all_reduce(total, group=get_gloo_group())
    return float(total)
