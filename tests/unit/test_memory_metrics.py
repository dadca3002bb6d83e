"""Memory after a phase, as it is logged."""

from __future__ import annotations

import resource

import torch

from slime.observability import profiler
from slime.observability.profiler import memory_after


def test_on_a_cpu_the_resident_memory_of_the_process_is_what_is_known(monkeypatch):
    monkeypatch.setattr(profiler.accelerator, "kind", lambda: "cpu")
    (name, value), *rest = memory_after("train").items()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    assert (name, rest) == ("memory/after_train/host_rss_gb", [])
    assert 0.01 < value <= peak_gb * 1.01


def test_with_cuda_the_whole_gpu_and_torchs_share_of_it_are_told_too(monkeypatch):
    monkeypatch.setattr(profiler.accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(profiler.accelerator, "process_bytes", lambda: 5_000_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60_000_000_000, 141_000_000_000))  # free, total
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3_000_000_000)
    found = memory_after("sleep")
    del found["memory/after_sleep/host_rss_gb"]
    assert found == {
        "memory/after_sleep/gpu_used_gb": 81.0,
        "memory/after_sleep/gpu_process_gb": 5.0,
        "memory/after_sleep/torch_allocated_gb": 2.0,
        "memory/after_sleep/torch_reserved_gb": 3.0,
    }
