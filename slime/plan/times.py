"""Seconds of every phase of one rollout, estimated from a few device rates; how weights travel; what is written.

    generate    response tokens per engine go through in rounds of at most R requests (what the cache, the concurrency
                flag or the engine allows); a decode step reads this rank's weights and the cache of R sequences of
                mean length, or computes 2 x active parameters x R, and adds `decode_step_s` and, under TP, two
                all-reduces a layer; the longest response sets the number of steps of the last round. Prefill: 2 x
                active parameters per distinct prompt token.
    log-probs   forward FLOPs of all samples, once for each pass, over all trainer ranks at `infer_flops`
    train       three times the forward FLOPs (four with full recomputation), at `train_flops`; pipeline stages idle
                for (pp - 1) / (micro-batches x vpp) of it
                Of both, model parallelism keeps a share (`kept_share`), and a layer of a micro-batch takes at least
                what Python needs to start it (`layer_start_s`).
    weight sync bytes of the model over the link, the network or a disk
    offload     state to pinned memory and back at `host_bandwidth`

The table of devices has the rates and their sources. Reward functions and tools take no time here.

Rates are those that were achieved, not those of data sheets, where we have measured; the sources are named beside the
numbers. Times that are made from them are estimates: good for "minutes or days", not for a benchmark. It looks at no
device: whoever plans says which one is meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime.plan.layout import BatchPlan, ParallelLayout
from slime.plan.trainer_memory import Precision, TrainerMemory, moment_bytes, recompute_of
from slime.utils import flops_utils
from slime.utils.model_shape import ModelShape
from slime.weights.formats import WeightFormat, quantized_parts
from slime.weights.transports import transport_of

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.plan.fit import EngineMemory

GB = 10**9
MIB = 2**20


@dataclass(frozen=True)
class Device:
    """One device (GPU, or the CPU share of one slot)."""

    name: str
    memory_bytes: int  # What a process can allocate; all slots share it where `is_shared`
    # FLOP/s of forward and backward matrix products, attention included, as a training step achieves them
    train_flops: float
    infer_flops: float  # FLOP/s of a prefill or a forward-only pass
    memory_bandwidth: float  # Bytes/s of reading weights and KV cache
    link_bandwidth: float  # Bytes/s between two devices of a node, as a weight sync by NCCL achieves them
    ipc_bandwidth: float  # Bytes/s of a weight sync between two processes on one device
    host_bandwidth: float  # Bytes/s between device and pinned host memory, one way
    network_bandwidth: float  # Bytes/s between two nodes, per device
    # Seconds of one decode step beside reading weights and cache: scheduler, sampling, kernel starts
    decode_step_s: float
    reserved_bytes: int  # Taken before the first tensor: CUDA context, libraries, NCCL buffers
    # Seconds that the host takes to start a layer of a micro-batch: forward, and forward and backward
    layer_start_s: tuple[float, float] = (0.0, 0.0)
    is_shared: bool = False
    source: str = ""


# Measured on H200s (benchmarks/RESULTS.md), 4B where there is a figure: 60.5% of the 788 TFLOP/s of a bf16 product
# in a train step, 72.0% in log-probs; 8.04 GB of weights by NCCL in 0.034 s, by CUDA IPC in 0.076 s; 55 GB/s to pinned
# memory; copies at 4.3 TB/s. 512 requests x 512 tokens of 0.6B at 43,115 tokens/s are 11.9 ms a decode step, of which
# reading 18.8 GB of cache and 1.2 GB of weights explains 4.7 ms. A layer's start: the 0.6B shape at a4d21dd.
_H200 = Device(
    name="h200-141gb",
    memory_bytes=141 * GB,
    train_flops=477e12,
    infer_flops=567e12,
    memory_bandwidth=4.3e12,
    link_bandwidth=236e9,
    ipc_bandwidth=106e9,
    host_bandwidth=55e9,
    network_bandwidth=25e9,
    decode_step_s=0.0072,
    reserved_bytes=2 * GB,
    layer_start_s=(0.0017, 0.0048),
    source="measured on an H200 (4B: products, weight syncs; 0.6B: decoding); network 200 Gb/s assumed",
)


def _like_h200(name: str, gigabytes: int, *, compute: float, bandwidth: float, host: float = 55e9) -> Device:
    """A device by its share of the H200's compute and bandwidth (from both data sheets), as nothing was measured."""
    return replace(
        _H200,
        name=name,
        memory_bytes=gigabytes * GB,
        train_flops=_H200.train_flops * compute,
        infer_flops=_H200.infer_flops * compute,
        memory_bandwidth=_H200.memory_bandwidth * bandwidth,
        host_bandwidth=host,
        source="the H200's measured rates scaled by the data sheets",
    )


# Data sheets, dense bf16 TFLOP/s and TB/s: H200 989, 4.8; H100 SXM 989, 3.35; H20 148, 4.0; A100 312, 2.0; B200 2250,
# 8.0; L40S 362, 0.86.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _H200,
        _like_h200("h100-80gb", 80, compute=1.0, bandwidth=3.35 / 4.8),
        _like_h200("h20-96gb", 96, compute=148 / 989, bandwidth=4.0 / 4.8),
        _like_h200("a100-80gb", 80, compute=312 / 989, bandwidth=2.0 / 4.8, host=25e9),
        _like_h200("a100-40gb", 40, compute=312 / 989, bandwidth=1.55 / 4.8, host=25e9),
        _like_h200("b200-180gb", 180, compute=2250 / 989, bandwidth=8.0 / 4.8),
        _like_h200("l40s-48gb", 48, compute=362 / 989, bandwidth=0.86 / 4.8, host=25e9),
    )
}
DEFAULT_GPU = "h100-80gb"
DEVICE_CHOICES = tuple(DEVICES)

# One thread of the machine that CI uses: benchmarks/plan_accuracy.py trains 108 M parameters at 50 GFLOP/s, and a
# decode step of benchmarks/cpu_step.py takes 4 ms.
_CPU_MEMORY_SHARE = 10e9


def cpu_device(memory_bytes: int) -> Device:
    """A slot of a machine without GPUs; all slots share its `memory_bytes`."""
    return Device(
        name="cpu",
        memory_bytes=memory_bytes,
        train_flops=5e10,
        infer_flops=5e10,
        memory_bandwidth=_CPU_MEMORY_SHARE,
        link_bandwidth=1e9,
        ipc_bandwidth=1e9,
        host_bandwidth=_CPU_MEMORY_SHARE,
        network_bandwidth=1e9,
        decode_step_s=0.004,
        reserved_bytes=700 * MIB,
        is_shared=True,
        source="one core, measured coarsely",
    )


def device_of_gpu(name: str, memory_bytes: int) -> Device:
    """The entry for a GPU that is here, by the name that its driver gives it; its own memory size counts.

    A name that is in no entry gets the default's rates, and says so.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    near = [d for d in DEVICES.values() if d.name.split("-")[0] in words]
    if not near:
        source = f"{name} is not in the table of devices: rates of {DEFAULT_GPU}"
        return replace(DEVICES[DEFAULT_GPU], name=name, memory_bytes=memory_bytes, source=source)
    best = min(near, key=lambda d: abs(d.memory_bytes - memory_bytes))
    return replace(best, name=name, memory_bytes=memory_bytes)


ALL_REDUCE_S = 1e-5  # Seconds of the smallest all-reduce between the GPUs of an engine, assumed
DISK_BANDWIDTH = 2e9  # Bytes/s of a shared file system, assumed


@dataclass(frozen=True)
class Phase:
    """One phase of a rollout."""

    name: str
    seconds: float
    formula: str  # With its numbers


@dataclass(frozen=True)
class Rollout:
    """What the time of a rollout depends on, besides memory."""

    args: Args
    shape: ModelShape
    device: Device
    layout: ParallelLayout
    batch: BatchPlan

    @property
    def starts(self) -> int:
        """How often a rank starts a layer in a pass over the rollout."""
        layers = max(map(len, self.layout.stage_layers))
        return layers * self.batch.micro_batches_per_rank * self.batch.steps_per_rollout

    def flops(self) -> float:
        """FLOPs of a forward pass over all samples."""
        return forward_flops(self.shape, self.batch.tokens_per_rollout, self.batch.lengths.mean)


def phases(
    rollout: Rollout,
    trainer: TrainerMemory | None,
    engines: list[EngineMemory],
    *,
    num_engines: int,
    sends: Transport | None,
) -> Iterator[Phase]:
    """Phases of one rollout in their order; `sends` is the weight sync."""
    args, device = rollout.args, rollout.device
    if engines:
        yield generate_phase(rollout, engines[0], num_engines)
    if trainer is None:
        return
    if passes := num_log_prob_passes(args, rollout.batch.steps_per_rollout):
        yield log_probs_phase(rollout, passes)
    train = train_phase(rollout)
    epochs = f"{args.ppo_epochs} passes of " if args.ppo_epochs > 1 else ""
    yield Phase(train.name, args.ppo_epochs * train.seconds, epochs + train.formula)
    if args.use_critic:
        values = log_probs_phase(rollout, 1)
        yield Phase("critic", values.seconds + train.seconds, "values, then training as the actor")
    if sends is not None:
        formula = f"{sends.num_bytes / 1e9:.2f} GB {sends.way.split(':')[0]} at {sends.bandwidth / 1e9:.3g} GB/s"
        yield Phase("weight sync", sends.num_bytes / sends.bandwidth, formula)
    if (args.offload_train or args.offload_rollout) and args.accelerator != "cpu":
        # The trainer's state goes to the host and back, the engine's weights only back.
        moved = 2 * max(stage.state for stage in trainer.stages) if args.offload_train else 0
        moved += engines[0].weights if engines and args.offload_rollout else 0
        formula = f"{moved / 1e9:.1f} GB per GPU at {device.host_bandwidth / 1e9:.3g} GB/s"
        yield Phase("offload", moved / device.host_bandwidth, formula)


def num_log_prob_passes(args: Args, steps_per_rollout: int) -> int:
    """Forward-only passes of the trainer over a rollout: the reference's, and old log-probs that the loss lacks."""
    if args.loss_type == "sft_loss" or not args.compute_advantages_and_returns:
        return 0
    in_loss = steps_per_rollout == 1 and args.loss_type == "policy_loss" and args.kl_coef == 0
    in_loss = in_loss and not args.use_rollout_entropy and args.ppo_epochs == 1
    old = args.recompute_old_log_probs or args.use_rollout_logprobs or args.keep_old_actor or not in_loss
    return int(bool(old)) + int(args.use_kl_loss or args.kl_coef != 0)


def forward_flops(shape: ModelShape, tokens: float, mean_length: float) -> float:
    """FLOPs of a forward pass over `tokens` tokens in sequences of `mean_length` (slime.utils.flops_utils)."""
    return tokens / mean_length * flops_utils.forward_flops(shape, [mean_length]) if tokens else 0.0


def decode_seconds(shape: ModelShape, device: Device, engine: EngineMemory, *, requests: int, context: float) -> float:
    """Seconds of one decode step of an engine with that many running requests of mean length `context`."""
    read = engine.weights + requests * context * engine.kv_bytes_per_token
    compute = 2.0 * shape.num_active_params * requests / (engine.tp * engine.pp)
    sent = 2 * 2 * requests * shape.hidden_size / device.link_bandwidth  # an all-reduce in 16 bit, both ways
    reduces = 2 * shape.num_layers * (ALL_REDUCE_S + sent) if engine.tp > 1 else 0.0
    return max(read / device.memory_bandwidth, compute / device.infer_flops) + reduces + device.decode_step_s


def generate_phase(rollout: Rollout, engine: EngineMemory, num_engines: int) -> Phase:
    """Generation of one rollout; each engine is sent --sglang-server-concurrency requests at most."""
    shape, device, batch, lengths = rollout.shape, rollout.device, rollout.batch, rollout.batch.lengths
    per_engine = -(-batch.samples_per_rollout // num_engines)
    fitting = max(1, engine.kv_tokens // max(1, lengths.mean))
    limits = per_engine, fitting, rollout.args.sglang_server_concurrency, engine.max_running_requests or per_engine
    running = max(1, min(limits))
    steps = max(per_engine / running * lengths.mean_response, lengths.max_response)
    context = lengths.mean_prompt + lengths.mean_response / 2
    step_s = decode_seconds(shape, device, engine, requests=running, context=context)
    prompt_tokens = batch.prompts_per_rollout * lengths.mean_prompt / num_engines
    prefill = forward_flops(shape, prompt_tokens, lengths.mean_prompt) / (device.infer_flops * engine.tp * engine.pp)
    text = (
        f"{steps:.0f} decode steps x {step_s * 1e3:.1f} ms, {running} requests at once on each of {num_engines} "
        f"engine(s), prefill {prefill:.1f} s"
    )
    return Phase("generate", steps * step_s + prefill, text)


def log_probs_phase(rollout: Rollout, passes: int) -> Phase:
    """All forward-only passes of the trainer over one rollout."""
    flops, device, ranks = rollout.flops(), rollout.device, rollout.layout.world_size
    text = f"{passes} x {flops / 1e15:.3g} PFLOP on {ranks} x {device.name}"
    busy = flops / (device.infer_flops * ranks * kept_share(rollout.layout))
    started = rollout.starts * device.layer_start_s[0]
    return Phase("log-probs", passes * max(busy, started), text + _bound(busy, started))


def train_phase(rollout: Rollout) -> Phase:
    """Forward, backward and optimizer over one rollout."""
    flops, rate, layout = rollout.flops(), rollout.device.train_flops, rollout.layout
    factor = 4 if recompute_of(rollout.args).granularity == "full" else 3
    bubble = (layout.pp - 1) / max(1, rollout.batch.micro_batches_per_rank * layout.vpp)
    text = f"{factor} x {flops / 1e15:.3g} PFLOP at {rate / 1e12:.3g} TFLOP/s per rank"
    busy = factor * flops / (rate * layout.world_size * kept_share(layout))
    started = rollout.starts * (rollout.device.layer_start_s[1] + (factor - 3) * rollout.device.layer_start_s[0])
    text += (f", pipeline bubble {bubble:.0%}" if bubble else "") + _bound(busy, started)
    return Phase("train", max(busy, started) * (1 + bubble), text)


KEPT_PER_DOUBLING = {"tp": 0.84, "pp": 0.95, "cp": 0.82}
"""Share of one GPU's speed that is left where a model of 4B is cut in two by this dimension, bubbles apart. Measured
(benchmarks/RESULTS.md): TP 2 0.87, PP 2 0.95, CP 2 0.82 of a GPU alone; beside DP 4 of the same host TP 4 0.75, PP 4
0.89, and CP 4 0.64 by MFU. EP 2 was as fast as one GPU, so experts count for nothing."""


def kept_share(layout: ParallelLayout) -> float:
    """The share of one GPU's speed that each rank of a layout keeps."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    return math.prod(KEPT_PER_DOUBLING[name] ** math.log2(max(1, size)) for name, size in sizes.items())


def _bound(busy: float, started: float) -> str:
    return (
        f", bound by the host's starts of small micro-batches ({started / busy:.1f} times)" if started > busy else ""
    )


@dataclass(frozen=True)
class Transport:
    """The weight sync."""

    way: str
    num_bytes: int  # Of one full set of weights: in the trainer's precision, or quantised as the engines store them
    bucket_bytes: int
    num_buckets: int
    every: str  # How often, in words
    bandwidth: float  # Bytes/s assumed for the estimate


@dataclass(frozen=True)
class Output:
    """Something that the run writes."""

    what: str
    where: Any  # a path
    size_bytes: int | None  # None: depends on the run
    when: str


def transport(
    args: Args, shape: ModelShape, device: Device, *, num_nodes: int, fmt: WeightFormat | None = None
) -> Transport | None:
    """The way of the weights, which are quantised where the engines' checkpoint is (`fmt`); None without engines."""
    if args.debug_train_only or args.debug_rollout_only:
        return None
    serves_adapters = bool(args.lora_rank) and args.lora_serve == "adapter"
    if serves_adapters:
        num_bytes, fmt = num_adapter_params(args, shape) * Precision.of(args).weight, None
    else:
        num_bytes = hf_bytes(args, shape, fmt)
    network = device.network_bandwidth if num_nodes > 1 else device.link_bandwidth
    sync = transport_of(args.update_weight_transport, args.update_weight_mode)
    if sync.title:
        way, bandwidth = sync.title, network
    elif sync.is_over_files:
        encoding = args.update_weight_delta_encoding
        kind = f"changed bytes ({encoding})" if sync.sends_changes else "full HF checkpoint"
        way, bandwidth = f"disk: {kind} under {args.update_weight_disk_dir or '(no directory given)'}", DISK_BANDWIDTH
    elif args.colocate:
        # Both hand over one flattened tensor a bucket; only its handle travels.
        is_cpu = args.accelerator == "cpu"
        way = "colocated tensors in shared memory" if is_cpu else "colocated tensors over CUDA IPC"
        bandwidth = device.ipc_bandwidth
        if not is_cpu and args.rollout_num_gpus > args.actor_num_nodes * args.actor_num_gpus_per_node:
            way += ", NCCL broadcast to engines behind the trainer's GPUs"
            bandwidth = network
    else:
        way = ("gloo" if args.accelerator == "cpu" else "NCCL") + " broadcast from the trainer to every engine rank"
        bandwidth = network
    if serves_adapters and not sync.is_over_files:
        way = "LoRA adapters in shared memory; files where an engine is on another host"
    if fmt is not None:
        way += f", as {fmt.kind}"
    bucket = num_bytes if serves_adapters else min(args.update_weight_buffer_size, num_bytes)
    interval = args.update_weights_interval
    every = "every rollout" if interval == 1 else f"every {interval} rollouts (train_async.py)"
    return Transport(way, num_bytes, bucket, -(-num_bytes // max(1, bucket)), every, bandwidth)


def hf_bytes(args: Args, shape: ModelShape, fmt: WeightFormat | None) -> int:
    """Of the model as HF tensors: in the trainer's precision, but for what `fmt` quantises."""
    parts, itemsize = shape.components, Precision.of(args).weight
    if fmt is None:
        return parts["total"] * itemsize
    quantized = sum(parts[part] for part in quantized_parts(fmt))
    return fmt.bytes_of_params(quantized, itemsize=itemsize) + (parts["total"] - quantized) * itemsize


def outputs(args: Args, shape: ModelShape | None, fmt: WeightFormat | None = None) -> list[Output]:
    """Everything that the run writes, in the order in which it happens; HF exports are stored as `fmt` says."""
    saved = checkpoint_bytes(args, shape, fmt) if shape else None
    export = hf_bytes(args, shape, fmt) if shape else None
    when = (
        f"every {args.save_interval} rollouts, and after the last" if args.save_interval else "after the last rollout"
    )
    if args.keep_checkpoints:
        when += f"; the newest {args.keep_checkpoints} are kept"
    urls = vars(args).get("remote_urls", {})  # what is sent there is not shown by its local place
    save, save_hf = urls.get("save", args.save), urls.get("save_hf", args.save_hf)
    often, sync = "every rollout", transport_of(args.update_weight_transport, args.update_weight_mode)
    found = [
        Output("metrics", f"{args.output_dir}/metrics.jsonl", None, often),
        Output("logs", f"{args.output_dir}/logs/", None, "as they come"),
        Output("answers", args.log_eval_samples and f"{args.output_dir}/eval_samples.jsonl", None, "every evaluation"),
        Output("samples", _records(args), None, f"every rollout; kept: {args.keep_rollouts}"),
        Output("checkpoint", save and f"{save}/iter_<rollout id>/", saved, when),
        Output("data position", save and f"{save}/rollout/", None, when),
        Output("HF export", save_hf, export, when),
        Output("rollout dump", args.save_debug_rollout_data, None, often),
        Output("trainer's inputs", args.save_debug_train_data, None, often),
        Output("dumps of both", args.dump_details, None, often),
        Output("W&B files", args.use_wandb and args.wandb_dir, None, often),
        Output("TensorBoard", args.use_tensorboard and args.tb_project_name, None, often),
        Output(
            "weights for the engines",
            args.update_weight_disk_dir,
            None,
            "every weight sync" + ("" if sync.is_over_files else ", if there is no other way"),
        ),
    ]
    return [replace(output, where=str(output.where)) for output in found if output.where]


def _records(args: Args) -> str | None:
    return None if args.keep_rollouts == "none" else f"{args.output_dir}/rollouts/<rollout id>.parquet"


def checkpoint_bytes(args: Args, shape: ModelShape, fmt: WeightFormat | None = None) -> int:
    """What --checkpoint-contents says: weights as trained, the optimizer's fp32 state, an HF export."""
    contents = args.checkpoint_contents or ("model", "optimizer")
    export = hf_bytes(args, shape, fmt) if "hf" in contents else 0
    trained = num_adapter_params(args, shape) if args.lora_rank else shape.num_params
    precision = Precision.of(args)
    weight, optimizer = (
        (4, moment_bytes(args, shape, trained))
        if args.train_backend == "fsdp"
        else (precision.weight, precision.saved * trained)
    )
    peft = precision.weight * trained if args.lora_rank else 0  # adapters are saved once more as a PEFT directory
    return weight * trained + (optimizer if "optimizer" in contents else 0) + peft + export


def num_adapter_params(args: Args, shape: ModelShape) -> int:
    """Parameters of all LoRA adapters: what a run with them saves, and by --lora-serve adapter sends."""
    layers = [shape.adapter_params(layer, args.lora_rank or 0) for layer in range(shape.num_layers)]
    in_layers = sum(layer.attention + layer.mlp + layer.replicated + layer.experts for layer in layers)
    return in_layers + sum(shape.output_adapter_params(args.lora_rank or 0))
