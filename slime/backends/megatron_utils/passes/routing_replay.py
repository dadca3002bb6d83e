"""Routing replay: the experts that one pass (or the engine) chose are those of the passes after it.

R2 (--use-routing-replay): the pass of the old log-probs records, training replays. R3 (--use-rollout-routing-replay):
what the engine chose is replayed in the old log-probs and in training. Reference and teacher choose by themselves. The
choices are a column of the rollout, `routed_experts`: per sample [rows, layers, topk] int16, with the rows and layers
that this rank computes; so they follow their sample through any packing. How a router replays it does not know
(slime.backends.megatron_utils.layers.routing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.cp_utils import prepare_routed_experts_for_routing_replay
from slime.backends.megatron_utils.layers.routing import Routing, prediction_routers_of, routers_of
from slime.backends.megatron_utils.model_provider import unwrap
from slime.training.micro_batches import MicroBatches
from slime.utils.train_data import MicroBatch, RolloutBatch

COLUMN: Final = "routed_experts"
FROM_ENGINE: Final = "rollout_routed_experts"

_recorded: list[Routing] | None = None
_is_free = False


def tell_routers(model: torch.nn.Module, batch: MicroBatch) -> None:
    """Tell the routers of a chunk about the micro-batch that it computes next."""
    chunk = unwrap(model)
    routers, predicting = routers_of(chunk), prediction_routers_of(chunk)
    if not routers and not predicting:
        return
    masks = batch["loss_masks"]
    routing = Routing(batch["padding"], sum((mask.sum() for mask in masks), torch.zeros_like(masks[0].sum())))
    if _recorded is not None and routers:
        routing.recorded = {}
        routing.extra = {"stage": getattr(chunk, "vp_stage", None) or 0, "rows": batch["sample_rows"]}
        _recorded.append(routing)
    elif not _is_free and COLUMN in batch and routers:
        first = getattr(chunk, "first_router", 0)
        routing.replayed = _packed(batch[COLUMN], len(batch["padding"]))[:, first : first + len(routers)]
    for router in routers:
        router.told = routing
    for router in predicting:
        router.told = Routing(routing.padding, routing.num_trained)


def _packed(samples: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """[T, layers, topk] of a micro-batch; padding rows go to the first experts."""
    rows = torch.cat(list(samples))
    missing = num_rows - len(rows)
    filler = torch.arange(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    return torch.cat([rows, filler.expand(missing, *rows.shape[1:])]) if missing else rows


@contextmanager
def free_routing() -> Iterator[None]:
    """A pass of other weights than the policy's: its routers choose, whatever the rollout's column says."""
    global _is_free
    _is_free = True
    try:
        yield
    finally:
        _is_free = False


@contextmanager
def recorded_routing(
    model: list[torch.nn.Module], batches: MicroBatches, rollout_data: RolloutBatch
) -> Iterator[None]:
    """A pass over `batches` whose choices become a column of `rollout_data`."""
    global _recorded
    _recorded = []
    try:
        yield
        if _recorded:
            rollout_data[COLUMN] = _as_column(model, batches, _recorded)
    finally:
        _recorded = None


def _as_column(model: list[torch.nn.Module], batches: MicroBatches, told: list[Routing]) -> list[torch.Tensor]:
    stages = sorted({routing.extra["stage"] for routing in told})
    per_stage = [[routing for routing in told if routing.extra["stage"] == stage] for stage in stages]
    per_micro_batch = []
    for routings in zip(*per_stage, strict=True):
        layers = [routing.recorded[i] for routing in routings for i in sorted(routing.recorded or {})]
        rows = _gather_rows(torch.stack(layers, dim=1), get_model_config(model[0]).sequence_parallel)
        counts = routings[0].extra["rows"]
        per_micro_batch.append(list(rows[: sum(counts)].split(counts)))
    _number_routers(model)
    return batches.scatter(per_micro_batch)


def _gather_rows(rows: torch.Tensor, is_split: bool) -> torch.Tensor:
    """All rows of the micro-batch, where tensor-parallel ranks route a part each (sequence parallelism)."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not is_split or group.size() == 1:
        return rows
    sent = rows.contiguous().view(torch.uint8)  # neither NCCL nor gloo knows int16
    parts = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(parts, sent, group=group)
    return torch.cat(parts).view(rows.dtype)


def _number_routers(model: list[torch.nn.Module]) -> None:
    """Note at each chunk how many routers of this rank come before its own."""
    first = 0
    for chunk in map(unwrap, model):
        chunk.first_router = first
        first += len(routers_of(chunk))


def take_engine_routing(model: list[torch.nn.Module], data: RolloutBatch, *, num_experts: int) -> None:
    """Turn the engine's column of a share into `routed_experts`.

    Raises:
        ValueError: there is no such column, a sample's choices do not have the shape of its tokens and the model, or
            name no expert.
    """
    if FROM_ENGINE not in data:
        raise ValueError(
            f"--use-rollout-routing-replay: no sample has {FROM_ENGINE}; its engine must be one that the run starts "
            "(or run with --enable-return-routed-experts and be asked without SGLang's router), and custom code must "
            "give what it answers to Sample.append_response_tokens (meta_info); or leave the flag out"
        )
    _number_routers(model)
    routers = [router for chunk in model for router in routers_of(unwrap(chunk))]
    layers = [router.layer_number - 1 for router in routers]
    config, device = get_model_config(model[0]), data["tokens"][0].device
    data[COLUMN] = [
        prepare_routed_experts_for_routing_replay(
            experts, len(tokens), num_layers=config.num_layers, layers=layers, topk=config.moe_router_topk
        ).to(device)
        for experts, tokens in zip(data.pop(FROM_ENGINE), data["tokens"], strict=True)
    ]
    if any(int(rows.max()) >= num_experts or int(rows.min()) < 0 for rows in data[COLUMN] if rows.numel()):
        raise ValueError(f"{FROM_ENGINE} names experts that the model of {num_experts} experts does not have")
