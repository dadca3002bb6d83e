"""Why an engine did not start, from the lines that SGLang and torch write: its last error, and what to change when it
had too little GPU memory.

SGLang gives `mem_fraction_static` of the memory that is free when it begins to weights and KV cache together. Too high
a fraction leaves too little for CUDA graphs and activations (or does not fit beside another process: "CUDA out of
memory"); too low a one leaves nothing for the cache. It reads text and knows no process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

FLAG = "--sglang-mem-fraction-static"
MARGIN = 0.02
"""Of the device, on top of what was missing: the next allocations are of the same kind."""
CACHE_GB = 2.0
"""The smallest cache that is proposed."""

_NUMBER = r"([\d.]+)"
_TRIED = re.compile(rf"Tried to allocate {_NUMBER} ([MG])iB")
_CAPACITY = re.compile(rf"total capacity of {_NUMBER} GiB of which {_NUMBER} ([MG])iB is free")
_OTHERS = re.compile(rf"Process \d+ has {_NUMBER} GiB memory in use")
_FRACTION = re.compile(rf"mem_fraction_static={_NUMBER}")
_LOAD_BEGIN = re.compile(rf"Load weight begin\. avail mem={_NUMBER} GB")
_LOAD_END = re.compile(rf"Load weight end\..*?avail mem={_NUMBER} GB")
OUT_OF_MEMORY = "CUDA out of memory"
CONTEXT = "CUDA error: out of memory"
"""Not even the process's own context fitted: another one holds the GPU."""
NO_CACHE = (
    "Loaded weights leave no GPU memory for the KV cache",
    "Not enough memory. Please try to increase --mem-fraction-static",
)
"""Nothing is left of its share, or less than one page."""
FREE_IT = "free what else holds the GPU (with --colocate: give --offload-train)"
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?::.*)?$", re.MULTILINE)
_FOLLOWS = ("EOFError", "scheduler is dead", "scheduler died", "Initialization failed", "see the error messages above")
GRAPHS = "Capture cuda graph failed"


def last_error(log: str) -> str | None:
    """Return the last exception in a log, without those that only follow from another; None where there is none.

    Example:
        >>> last_error("ValueError: no such model\\n[10:00] killing\\nRuntimeError: Rank 0 scheduler is dead")
        'ValueError: no such model'
    """
    found = _EXCEPTION.findall(log)
    causes = [line for line in found if not any(sign in line for sign in _FOLLOWS)]
    return next(reversed(causes or found), None)


def memory_advice(log: str, settings: Mapping[str, Any]) -> str | None:
    """A sentence with the flag to change and a value for it; None when the failure is another.

    Args:
        log: what the engine wrote from this start on.
        settings: the ServerArgs values that it was started with.
    """
    if any(line in log for line in NO_CACHE):
        return _too_little_for_the_cache(log, settings)
    if OUT_OF_MEMORY in log:
        return _out_of_memory(log, settings)
    if CONTEXT in log:
        return f"another process holds the GPU's memory; free it, or lower that process's {FLAG}"
    return None


def _too_little_for_the_cache(log: str, settings: Mapping[str, Any]) -> str:
    fraction = _fraction(log, settings)
    begin, end = _last(_LOAD_BEGIN, log), _last(_LOAD_END, log)
    what = f"the engine's weights leave no GPU memory for the KV cache in its {FLAG} {_shown(fraction)}"
    if begin is None or end is None:
        return f"{what}; raise it, or raise --rollout-num-gpus-per-engine."
    if begin < CACHE_GB:
        return f"another process holds the GPU: {begin:.1f} GB of it were free at the engine's start; {FREE_IT}."
    needed = math.ceil(100 * ((begin - end + CACHE_GB) / begin + MARGIN)) / 100
    found = f"{what}: of {begin:.1f} GB that were free at its start the weights took {begin - end:.1f} GB"
    if needed >= 1.0:
        return f"{found}; raise --rollout-num-gpus-per-engine, or {FREE_IT}."
    return f"{found}; raise it to {needed:.2f} or more."


def _out_of_memory(log: str, settings: Mapping[str, Any]) -> str:
    fraction, tried, capacity = _fraction(log, settings), _TRIED.findall(log), _CAPACITY.findall(log)
    what = f"the engine ran out of GPU memory at its start with {FLAG} {_shown(fraction)}"
    graphs = ", or lower --sglang-cuda-graph-max-bs-decode" if GRAPHS in log else ""
    if not tried or not capacity:
        return f"{what}; lower it{graphs}."
    wanted, (total, free, unit) = _gib(*tried[-1]), capacity[-1]
    missing, size = wanted - _gib(free, unit), float(total)
    found = f"{what}: {wanted:.2f} GiB were wanted and {_gib(free, unit):.2f} of {size:.1f} GiB were free"
    others = sum(map(float, _OTHERS.findall(log[log.rfind(OUT_OF_MEMORY) :])))
    if others:
        found += f" (other processes hold {others:.1f} GiB)"
    if fraction is None:
        return f"{found}; lower {FLAG}{graphs}."
    lower = math.floor(100 * (fraction - max(missing, 0.0) / size - MARGIN)) / 100
    if lower < 0.05:
        return f"{found}; no value of {FLAG} helps: free the GPU, or raise --rollout-num-gpus-per-engine."
    return f"{found}; lower it to {lower:.2f}{graphs}."


def _fraction(log: str, settings: Mapping[str, Any]) -> float | None:
    """As it was given, or as SGLang chose it: it prints its arguments."""
    given = settings.get("mem_fraction_static")
    return float(given) if given is not None else _last(_FRACTION, log)


def _last(pattern: re.Pattern[str], log: str) -> float | None:
    found = pattern.findall(log)
    return float(found[-1]) if found else None


def _gib(number: str, unit: str) -> float:
    return float(number) / (1024 if unit == "M" else 1)


def _shown(fraction: float | None) -> str:
    return "(as SGLang chose it)" if fraction is None else f"{fraction:g}"
