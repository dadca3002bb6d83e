"""Does it fit? The moments at which a GPU (or the host, without GPUs) holds most, and what to lower where not.

It adds up what trainer_memory and engine_memory say for the processes that share a device; it estimates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.utils.plan.devices import Device
from slime.utils.plan.engine_memory import EngineMemory
from slime.utils.plan.layout import SlotLayout
from slime.utils.plan.trainer_memory import TrainerMemory

if TYPE_CHECKING:
    from slime.config.args import Args


TOLERANCE = 0.10
"""Of the memory: by so much more a plan may say than a run takes (benchmarks/plan_accuracy.py: 7% at most)."""
TIGHT = 0.95
"""Of the memory: beyond it fragmentation may be what is too much."""
LOWER_TRAINER = (
    "lower --max-tokens-per-gpu (or --micro-batch-size), set --recompute-loss-function, give --recompute-granularity "
    "full --recompute-method uniform --recompute-num-layers 1, or raise --tensor-model-parallel-size"
)
LOWER_STATE = (
    "raise --tensor-model-parallel-size or --pipeline-model-parallel-size, or give the trainer more GPUs "
    "(--actor-num-nodes, --actor-num-gpus-per-node): its optimizer is sharded over them"
)
LOWER_ENGINE = "raise --rollout-num-gpus-per-engine, so that each GPU holds less of the weights"
LOWER_CACHE = (
    "lower --rollout-max-response-len, or raise --sglang-mem-fraction-static or --rollout-num-gpus-per-engine"
)
LOWER_SHARED = (
    "lower --sglang-mem-fraction-static, give --offload-train --offload-rollout, or take GPUs of their own for the "
    "engines (--rollout-num-gpus without --colocate)"
)
LOWER_CPU = "lower --sglang-max-total-tokens, the number of slots or the model"


@dataclass(frozen=True)
class Moment:
    """What one device holds at its fullest in one phase."""

    where: str
    when: str
    parts: dict[str, int]
    """Name -> bytes."""
    total: int
    limit: int
    fits: bool
    remedy: str
    """Empty where it fits."""

    @property
    def verdict(self) -> str:
        """In words: whether it fits, and what to do where not."""
        if not self.fits:
            return f"DOES NOT FIT: {self.remedy}"
        if self.when == "training" and self.total > TIGHT * self.limit:
            left = (self.limit - self.total) / 1e9
            return f"fits barely: {left:.1f} GB are left for fragmentation, which is not counted"
        return "fits"


@dataclass(frozen=True)
class Misfits:
    """What does not fit, a sentence each.

    Attributes:
        refused: by more than the plan may be wrong.
        doubtful: by less, or for another reason than the sum.
    """

    refused: list[str]
    doubtful: list[str]


def misfits(found: Iterable[Moment]) -> Misfits:
    """Sort the moments that do not fit by how sure that is."""
    refused, doubtful = [], []
    for moment in found:
        if moment.fits:
            continue
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in moment.parts.items())
        needed = (
            f"{moment.where} takes {moment.total / 1e9:.1f} GB while {moment.when} ({parts}), and has "
            f"{moment.limit / 1e9:.1f} GB"
        )
        if moment.total > (1 + TOLERANCE) * moment.limit:
            refused.append(f"the run does not fit: {needed}; {moment.remedy}; --ignore-plan starts it all the same.")
        else:
            doubtful.append(f"the run may not fit: {needed}; {moment.remedy}.")
    return Misfits(refused, doubtful)


def moments(
    args: Args,
    device: Device,
    slots: SlotLayout,
    *,
    trainers: list[TrainerMemory],
    engines: list[EngineMemory],
) -> list[Moment]:
    """The fullest moments of every kind of device that the run uses; `trainers` are the actor and a critic."""
    if device.is_shared:
        return [_host_moment(device, slots, trainers, engines)]
    shares = bool(args.colocate and engines and trainers)
    found = []
    for trainer, name, other in zip(trainers, ("trainer", "critic"), reversed(trainers), strict=False):
        waiting = [] if other is trainer else [other]
        found.append(_training(args, device, trainer, engines if shares else [], name=name, waiting=waiting))
    for engine in engines:
        found.append(_serving(args, device, trainers if shares else [], engine))
    return found


def _moment(where: str, when: str, parts: dict[str, int], limit: int, remedy: str) -> Moment:
    total = sum(parts.values())
    return Moment(where, when, parts, total, limit, total <= limit, "" if total <= limit else remedy)


def _released(args: Args) -> str:
    return " (offloaded)" if args.offload_train else " (ended)" if args.release_train else ""


def _at_rest(args: Args, device: Device, trainers: list[TrainerMemory]) -> int:
    """What trainers hold while others work."""
    if args.release_train:
        return 0
    states = [max(stage.state for stage in trainer.stages) for trainer in trainers]
    return len(states) * device.reserved_bytes if args.offload_train else sum(states)


def _training(
    args: Args,
    device: Device,
    trainer: TrainerMemory,
    engines: list[EngineMemory],
    *,
    name: str,
    waiting: list[TrainerMemory],
) -> Moment:
    stage = trainer.peak
    peak = max(stage.train_peak, stage.log_probs_peak)
    parts = {
        "weights": stage.weights,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        stage.peak_is if stage.train_peak >= stage.log_probs_peak else "log-probs": peak - stage.state,
        "context": device.reserved_bytes,
    }
    if waiting:
        parts["the other trainer" + _released(args)] = _at_rest(args, device, waiting)
    name = f"{name} GPU" + (f" of pipeline stage {stage.stage}" if len(trainer.stages) > 1 else "")
    if not engines:
        remedy = LOWER_STATE if stage.state + device.reserved_bytes > device.memory_bytes else LOWER_TRAINER
        return _moment(name, "training", parts, device.memory_bytes, remedy)
    static = max(engine.static for engine in engines)
    parts["engine" + (" (offloaded)" if args.offload_rollout else "")] = (
        device.reserved_bytes if args.offload_rollout else static
    )
    trainer_alone = peak + 2 * device.reserved_bytes
    remedy = LOWER_SHARED if trainer_alone <= device.memory_bytes else LOWER_TRAINER
    return _moment(f"shared GPU ({name})" if waiting else "shared GPU", "training", parts, device.memory_bytes, remedy)


def _serving(args: Args, device: Device, trainers: list[TrainerMemory], engine: EngineMemory) -> Moment:
    parts = {"weights": engine.weights, "KV cache": max(engine.kv_cache, 0), "context": device.reserved_bytes}
    name = "shared GPU" if trainers else "engine GPU"
    name += f" ({engine.name})" if engine.name else ""
    if trainers:
        parts["trainer" + _released(args)] = _at_rest(args, device, trainers)
    moment = _moment(name, "generating", parts, device.memory_bytes, LOWER_SHARED if trainers else LOWER_ENGINE)
    if engine.kv_cache <= 0 or engine.full_length_requests < 1:
        remedy = LOWER_ENGINE if engine.kv_cache <= 0 else LOWER_CACHE
        return Moment(name, moment.when, parts, moment.total, moment.limit, False, remedy)
    return moment


def _host_moment(
    device: Device, slots: SlotLayout, trainers: list[TrainerMemory], engines: list[EngineMemory]
) -> Moment:
    """Without GPUs everything lies in one memory, and no process gives any of it back."""
    parts = {}
    if trainers:
        peak = sum(max(each.peak.train_peak, each.peak.log_probs_peak) for each in trainers)
        processes = len(trainers) * device.reserved_bytes
        parts[f"{slots.num_trainers} trainer rank(s)"] = slots.num_trainers * (peak + processes)
    num_slots = slots.num_engine_slots
    if engines and num_slots:
        static = max(engine.static for engine in engines)
        parts[f"{num_slots} engine slot(s)"] = num_slots * (static + 2 * device.reserved_bytes)
    return _moment("the host", "training", parts, device.memory_bytes, LOWER_CPU)
