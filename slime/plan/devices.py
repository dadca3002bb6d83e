"""A small table of devices: how much memory each has, and how fast it does what a run needs.

Rates are those that were achieved, not those of data sheets, where we have measured; the sources are named beside the
numbers. Times that are made from them are estimates: good for "minutes or days", not for a benchmark. It looks at no
device: whoever plans says which one is meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
    is_shared: bool = False
    source: str = ""


# Measured on H200s (benchmarks/RESULTS.md), 4B where there is a figure: 60.5% of the 788 TFLOP/s of a bf16 product
# in a train step, 72.0% in log-probs; 8.04 GB of weights by NCCL in 0.034 s, by CUDA IPC in 0.076 s; 55 GB/s to pinned
# memory; copies at 4.3 TB/s. 512 requests x 512 tokens of 0.6B at 43,115 tokens/s are 11.9 ms a decode step, of which
# reading 18.8 GB of cache and 1.2 GB of weights explains 4.7 ms.
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
