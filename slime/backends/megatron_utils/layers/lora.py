"""LoRA adapters of Megatron's model: attached to linear layers (`lora_linear`), the base under them, PEFT's files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

from slime.backends.megatron_utils.layers.lora_linear import Adapter, ColumnLinear, RowLinear
from slime.backends.megatron_utils.layers.value_head import is_of_head, value_head_of
from slime.backends.megatron_utils.model.model_weights import is_tied_copy, iter_weights, num_copies
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.args import Args
from slime.config.megatron.lora_plan import LoraPlan, served_plan
from slime.models.families import OUTPUT_LAYER, family_of_args
from slime.training.adapters import (
    AdapterSource,
    compare_base,
    peft_config,
    refuse_adapters_alone,
    take_adapter,
    write_adapter,
)
from slime.utils.distributed_utils import gathered, get_gloo_group
from slime.weights.adapters import PEFT_PREFIX

logger = logging.getLogger(__name__)


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
    family = family_of_args(args)
    for model in models:
        bare = unwrap(model).requires_grad_(False)
        if head := value_head_of(model):
            head.requires_grad_(True)  # a critic's is trained as a whole, and saved with the adapters
        for name, module in _linears(bare, plan):
            of_hf = family.find(f"{name}.weight", args.num_layers)[1]
            peft_names = [PEFT_PREFIX + n.removesuffix(".weight") for n in of_hf]
            more: dict[str, Any] = {"peft_names": peft_names, "seed": args.seed}
            if name == OUTPUT_LAYER:
                more["num_rows"] = args.vocab_size
            # An output layer that is tied to an embedding on this rank has no weight of its own.
            weight = bare.shared_embedding_or_output_weight() if module.weight is None else module.weight
            _attach(module, weight, plan, name, **more)


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
    if plan.has_output_layer and bare.post_process:
        yield OUTPUT_LAYER, bare.output_layer


def _attach(module: Any, weight: torch.Tensor, plan: LoraPlan, name: str, **more: Any) -> None:
    linear = re.sub(r"(?<=local_experts\.)\d+", "{e}", name.split(".", 3)[-1])
    projections, config = plan.projections[linear], module.config
    sizes, groups = [weight.shape[0] // len(projections)] * len(projections), 0
    if len(projections) == 3:
        groups = config.num_query_groups // module.tp_group.size()
        keys = config.kv_channels * groups
        sizes = [weight.shape[0] - 2 * keys, keys, keys]
    parts: dict[str, Any] = {"projections": projections, "sizes": sizes, "groups": groups}
    module.lora = Adapter(module, weight, name=name, plan=plan, **parts, **more)
    module.__class__ = ColumnLinear if isinstance(module, ColumnParallelLinear) else RowLinear


def be_policy(args: Args, models: Sequence[torch.nn.Module], *, draws_for: str | None) -> None:
    """Let the adapters be those of a policy.

    Args:
        args: flags with the policy's values.
        models: this rank's chunks.
        draws_for: the policy's name, to draw its first values, too.
    """
    plan = LoraPlan.of(args)
    assert plan is not None, "without --lora-rank there are no adapters"
    seed = None if draws_for is None else f"{args.seed}/{draws_for}"
    for adapter in _adapters(models):
        adapter.be(plan, seed=seed)


def has_adapters(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the model of this rank was built with adapters."""
    return bool(_adapters(models))


def _adapters(models: Sequence[torch.nn.Module]) -> list[Adapter]:
    """The adapters of this rank, layer by layer."""
    return [module for model in models for module in model.modules() if isinstance(module, Adapter)]


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
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in adapter_tensors(models).items()}
    if dist.get_rank() == 0:
        write_adapter(tensors, peft_config(args), directory)


@torch.no_grad()
def adapter_tensors(models: Sequence[torch.nn.Module] | AdapterSource) -> dict[str, torch.Tensor]:
    """PEFT's names -> whole tensors, on every rank (collective); some are those that are trained."""
    if not isinstance(models, Sequence):
        return models.adapter_tensors()
    adapters = _adapters(models)
    is_split = parallel_state.get_pipeline_model_parallel_world_size() > 1 or (
        any(adapter.is_expert for adapter in adapters) and parallel_state.get_expert_model_parallel_world_size() > 1
    )
    tensors: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        is_ours = not is_split or _is_first_copy(adapter)
        for name, (_, a, b) in zip(adapter.peft_names, adapter.whole(), strict=True):
            if is_ours:
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    if not is_split:
        return tensors
    on_host = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    return {name: tensor for part in gathered(on_host) for name, tensor in part.items()}


def load_adapter(models: Sequence[torch.nn.Module], directory: str | Path) -> None:
    """Give the adapters the values of a PEFT directory; arguments and errors of `take_adapter`."""
    take_adapter(((adapter.peft_names, adapter) for adapter in _adapters(models)), directory)


def _is_first_copy(adapter: Adapter) -> bool:
    """Whether no rank before this one has the same adapter."""
    if adapter.is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0 and adapter.group.rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0 and adapter.group.rank() == 0
