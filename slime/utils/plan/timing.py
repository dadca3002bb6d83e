"""Seconds of every phase of one rollout, estimated from a few device rates.

    generate    response tokens per engine go through in rounds of at most R requests (what the cache, the concurrency
                flag or the engine allows); a decode step reads this rank's weights and the cache of R sequences of
                mean length, or computes 2 x active parameters x R, and adds `decode_step_s`; the longest response
                sets the number of steps of the last round. Prefill: 2 x active parameters per distinct prompt token.
    log-probs   forward FLOPs of all samples, once for each pass, over all trainer ranks at `infer_flops`
    train       three times the forward FLOPs (four with full recomputation), at `train_flops`; pipeline stages idle
                for (pp - 1) / (micro-batches x vpp) of it
    weight sync bytes of the model over the link, the network or a disk
    offload     state to pinned memory and back at `host_bandwidth`

Sources of the rates: slime.utils.plan.devices. It knows nothing about reward functions or tools, which take no time
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils import flops_utils
from slime.utils.plan.batch import BatchPlan
from slime.utils.plan.devices import Device
from slime.utils.plan.engine_memory import EngineMemory
from slime.utils.plan.layout import ParallelLayout
from slime.utils.plan.shape import ModelShape

DISK_BANDWIDTH = 2e9
"""Bytes/s of a shared file system, assumed."""


@dataclass(frozen=True)
class Phase:
    """One phase of a rollout."""

    name: str
    seconds: float
    formula: str
    """With its numbers."""


def forward_flops(shape: ModelShape, tokens: float, mean_length: float) -> float:
    """FLOPs of a forward pass over `tokens` tokens in sequences of `mean_length` (slime.utils.flops_utils)."""
    return tokens / mean_length * flops_utils.forward_flops(shape, [mean_length]) if tokens else 0.0


def decode_seconds(shape: ModelShape, device: Device, engine: EngineMemory, *, requests: int, context: float) -> float:
    """Seconds of one decode step of an engine with that many running requests of mean length `context`."""
    read = engine.weights + requests * context * engine.kv_bytes_per_token
    compute = 2.0 * shape.num_active_params * requests / (engine.tp * engine.pp)
    return max(read / device.memory_bandwidth, compute / device.infer_flops) + device.decode_step_s


def generate_phase(
    shape: ModelShape, device: Device, engine: EngineMemory, batch: BatchPlan, *, num_engines: int, concurrency: int
) -> Phase:
    """Generation of one rollout; `concurrency` requests at most are sent to an engine."""
    lengths = batch.lengths
    per_engine = -(-batch.samples_per_rollout // num_engines)
    fitting = max(1, engine.kv_tokens // max(1, lengths.mean))
    running = max(1, min(per_engine, fitting, concurrency, engine.max_running_requests or per_engine))
    rounds = per_engine / running
    steps = max(rounds * lengths.mean_response, lengths.max_response)
    context = lengths.mean_prompt + lengths.mean_response / 2
    step_s = decode_seconds(shape, device, engine, requests=running, context=context)
    prompt_tokens = batch.prompts_per_rollout * lengths.mean_prompt / num_engines
    prefill = forward_flops(shape, prompt_tokens, lengths.mean_prompt) / (device.infer_flops * engine.tp * engine.pp)
    text = (
        f"{steps:.0f} decode steps x {step_s * 1e3:.1f} ms, {running} requests at once on each of {num_engines} "
        f"engine(s), prefill {prefill:.1f} s"
    )
    return Phase("generate", steps * step_s + prefill, text)


def log_probs_phase(shape: ModelShape, device: Device, batch: BatchPlan, layout: ParallelLayout, passes: int) -> Phase:
    """All forward-only passes of the trainer over one rollout."""
    flops = passes * forward_flops(shape, batch.tokens_per_rollout, batch.lengths.mean)
    seconds = flops / (device.infer_flops * layout.world_size)
    text = f"{passes} x {flops / max(passes, 1) / 1e15:.3g} PFLOP on {layout.world_size} x {device.name}"
    return Phase("log-probs", seconds, text)


def train_phase(
    shape: ModelShape, device: Device, batch: BatchPlan, layout: ParallelLayout, *, is_recomputed: bool
) -> Phase:
    """Forward, backward and optimizer over one rollout."""
    times = 4 if is_recomputed else 3
    flops = times * forward_flops(shape, batch.tokens_per_rollout, batch.lengths.mean)
    bubble = (layout.pp - 1) / max(1, batch.micro_batches_per_rank * layout.vpp)
    seconds = flops / (device.train_flops * layout.world_size) * (1 + bubble)
    text = f"{times} x {flops / times / 1e15:.3g} PFLOP at {device.train_flops / 1e12:.3g} TFLOP/s per rank"
    return Phase("train", seconds, text + (f", pipeline bubble {bubble:.0%}" if bubble else ""))


def sync_phase(num_bytes: int, bandwidth: float, way: str) -> Phase:
    """One weight sync."""
    return Phase("weight sync", num_bytes / bandwidth, f"{num_bytes / 1e9:.2f} GB {way} at {bandwidth / 1e9:.3g} GB/s")


def offload_phase(device: Device, *, trainer_bytes: int, engine_bytes: int) -> Phase:
    """Moving the trainer's state to the host and back, and the engine's weights back in, once per rollout."""
    moved = 2 * trainer_bytes + engine_bytes
    text = f"{moved / 1e9:.1f} GB per GPU at {device.host_bandwidth / 1e9:.3g} GB/s"
    return Phase("offload", moved / device.host_bandwidth, text)
