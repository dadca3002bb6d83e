"""The memory of an SGLang engine; and whether everything fits: the fullest moments of each device, and their remedies.

SGLang takes `mem_fraction_static` of the device for weights and cache together; the rest is for activations, CUDA
graphs and the process itself. One token's cache is, on each tensor-parallel rank, keys and values of its share of the
heads (at least one head: more ranks than heads keep copies) in every layer; latent attention caches the latent and the
rotary key once on every rank. Settings come in as a mapping.

`moments` adds up what trainers and engines hold that share a device (without GPUs: the host).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.plan.layout import SlotLayout
from slime.plan.times import Device
from slime.plan.trainer_memory import TrainerMemory
from slime.utils.model_shape import ModelShape
from slime.weights.formats import PROBES, WeightFormat, quantized_parts

if TYPE_CHECKING:
    from slime.config.args import Args


# Of the memory: by so much more a plan may say than a run takes (benchmarks/plan_accuracy.py: 7% at most)
TOLERANCE = 0.10
TIGHT = 0.95  # Of the memory: beyond it fragmentation may be what is too much
ROOMY = 0.85  # Of the memory: up to it trainer and engines may stay together, with what no plan counts
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

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "half": 2, "float16": 2, "float32": 4, "float": 4}
KV_DTYPE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2, "float16": 2, "float32": 4}
# What SGLang chooses for a device of 80 GB and more, give or take a few points, where no flag says
MEM_FRACTION = 0.88


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each GPU of one kind of engine."""

    name: str
    tp: int
    pp: int
    ep: int
    dtype_bytes: int
    weights: int
    kv_bytes_per_token: int
    mem_fraction: float
    is_fraction_assumed: bool
    kv_cache: int  # Bytes left for the cache; negative where not even the weights fit into the fraction
    kv_tokens: int  # Tokens that fit, over the whole engine
    full_length_requests: int  # Requests of the longest prompt and response that fit at once
    max_running_requests: int | None  # As a flag says; None: SGLang decides
    static: int  # Weights and cache: what the process holds while it serves


def engine_memory(
    shape: ModelShape,
    device: Device,
    settings: Mapping[str, Any],
    *,
    num_gpus: int,
    longest: int,
    name: str = "",
    fmt: WeightFormat | None = None,
) -> EngineMemory:
    """Memory of an engine.

    Args:
        shape: the model that it serves (padding of the vocabulary is counted, the engine has none).
        device: of each rank.
        settings: ServerArgs values that were chosen.
        num_gpus: of the engine.
        longest: tokens of a full request.
        fmt: how the checkpoint that it serves is quantised.
    """
    pp, ep = settings.get("pp_size") or 1, settings.get("ep_size") or 1
    tp = max(1, num_gpus // pp)
    replicas = (settings.get("dp_size") or 1) if settings.get("enable_dp_attention") else 1
    dtype = DTYPE_BYTES.get(settings.get("dtype") or "auto", 2)
    weights = _weight_bytes(weight_params(shape, tp, pp, ep), dtype, fmt, bool(settings.get("quantization")))
    cache_dtype = KV_DTYPE_BYTES.get(settings.get("kv_cache_dtype") or "auto", dtype)
    per_token = kv_elements(shape, max(1, tp // replicas), pp) * cache_dtype
    fraction, limit = settings.get("mem_fraction_static") or MEM_FRACTION, settings.get("max_total_tokens")
    room = int(device.memory_bytes * fraction) - weights
    if device.is_shared and limit:
        room = limit * per_token  # the CPU engine allocates this many tokens and knows no fraction
    tokens = max(0, room // per_token)
    tokens = min(tokens, limit or tokens)
    cache = tokens * per_token if room > 0 else room
    return EngineMemory(
        name=name,
        tp=tp,
        pp=pp,
        ep=ep,
        dtype_bytes=dtype,
        weights=weights,
        kv_bytes_per_token=per_token,
        mem_fraction=fraction,
        is_fraction_assumed=not settings.get("mem_fraction_static"),
        kv_cache=cache,
        kv_tokens=tokens * replicas,
        full_length_requests=tokens * replicas // max(1, longest),
        max_running_requests=settings.get("max_running_requests"),
        static=weights + max(cache, 0),
    )


def _weight_bytes(parts: Mapping[str, int], itemsize: int, fmt: WeightFormat | None, quantizes: bool) -> int:
    """Bytes of a rank's parameters; what SGLang quantises itself takes about one byte, for scales are small."""
    quantized = sum(parts[part] for part in (quantized_parts(fmt) if fmt else PROBES if quantizes else ()))
    small = fmt.bytes_of_params(quantized, itemsize=itemsize) if fmt else quantized
    return small + (sum(parts.values()) - quantized) * itemsize


def weight_params(shape: ModelShape, tp: int, pp: int, ep: int) -> dict[str, int]:
    """Parameters by part of the model on the rank that has most: of the first or of the last pipeline stage.

    Experts are divided by TP whatever the expert parallelism is: that is a part of TP in SGLang (ep <= tp).
    """
    layers = [shape.layer_params(layer) for layer in range(shape.num_layers)]
    per_stage = -(-shape.num_layers // pp)
    stage = sorted(layers, key=lambda layer: -layer.total)[:per_stage]
    linear = {part: sum(vars(layer)[part] // max(tp, ep) for layer in stage) for part in PROBES}
    embeddings = 1 if shape.is_tied or pp > 1 else 2
    others = sum(layer.replicated for layer in stage) + embeddings * shape.embedding_params // tp + shape.norm_params
    others += shape.tower_params // tp
    return linear | {"others": others}


def kv_elements(shape: ModelShape, tp: int, pp: int) -> int:
    """Elements of one token's cache on one rank; with sparse attention the indexer's keys, too.

    A gated delta net has none, but a state for each request, which SGLang takes from the same memory
    (--mamba-full-memory-ratio): it is not counted.
    """
    layers = -(-shape.num_attention_layers // pp)
    if shape.latent is not None:
        keys = shape.indexer.head_dim if shape.indexer else 0
        return layers * (shape.latent.kv_lora_rank + shape.latent.qk_pos_emb_head_dim + keys)
    return layers * 2 * max(1, shape.num_query_groups // tp) * shape.kv_channels


@dataclass(frozen=True)
class Moment:
    """What one device holds at its fullest in one phase."""

    where: str
    when: str
    parts: dict[str, int]  # Name -> bytes
    total: int
    limit: int
    fits: bool
    remedy: str  # Empty where it fits

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
    """Bytes that trainers hold while others work. A trainer keeps its CUDA context, asleep or not."""
    if args.release_train:
        return 0
    states = 0 if args.offload_train else sum(max(stage.state for stage in trainer.stages) for trainer in trainers)
    return states + len(trainers) * device.reserved_bytes


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
    static = 0 if args.offload_rollout else max(engine.static for engine in engines)
    parts["engine" + (" (offloaded)" if args.offload_rollout else "")] = static + device.reserved_bytes
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
