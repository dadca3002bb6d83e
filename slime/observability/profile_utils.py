"""Upstream's path of what profiles and records memory, which is in slime.observability.profiler."""

from slime.observability.profiler import MemoryRecorder, Profiler, memory_after, recorder_of

__all__ = ["MemoryRecorder", "Profiler", "memory_after", "recorder_of"]
