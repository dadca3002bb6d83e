"""Where the time of a torch profiler's trace goes: kinds of kernels, an idle device and what it waits for, transfers.

A trace is what `torch.profiler` exports for chrome://tracing, from a trainer (--use-pytorch-profiler) or an engine
(tools/profile_rollout.py). With CUDA events in it, "work" means kernels and copies on the device; a trace of a CPU has
none, and its work is the self time of torch's operators. Functions return numbers in microseconds;
tools/analyze_profile.py shows them. (Perfetto draws the same files, but sums up neither idle time nor its cause.)

    busy     something runs on the device, in whatever stream
    idle     nothing does. Host-bound idle time: the kernel that ends the gap was not even launched yet, so the device
             waited for Python. The rest of idle time is between launch and start: other streams, other ranks' data
    exposed  a transfer between ranks runs and no computation hides it
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.utils.errors import UsageError

COMMUNICATION, COPIES = "communication", "copies"
_KINDS = (
    (COMMUNICATION, r"nccl|c10d::|gloo|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|nvshmem|deep_?ep"),
    ("attention", r"flash|fmha|attention|attn|_fwd_(grouped_)?kernel"),
    ("experts", r"moe|expert|grouped_(mm|gemm)"),
    (
        "matrix products",
        r"gemm|cutlass|cublas|nvjet|xmma|wgmma|split_?k|matmul|linear|::(add|b|addb|badd)?mm_?\b|::baddbmm",
    ),
    ("optimizer", r"multi_tensor|adam|foreach"),
    (COPIES, r"memcpy|memset|copy|clone|::(to|contiguous|cat|fill_|zero_)\b|catarray|fillfunctor"),
    ("sampling", r"sampl|top_?[kp]|sort|multinomial|gumbel|argmax"),
    ("norms, rotation, activations, loss", r"norm|rotary|rope|silu|swiglu|gelu|softmax|cross_entropy|triton_"),
    ("elementwise and sums", r"elementwise|reduce|vectorized|index|gather|scatter|embedding|^aten::"),
)
"""Kinds of work by name, in this order; what matches none is `other`."""
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
Event = Mapping[str, Any]
"""Of a trace: `name`, `cat`, `ts` and `dur` in microseconds, `pid`, `tid`, `args`."""
Intervals = np.ndarray
"""[n, 2]: starts and ends."""


@dataclass
class Total:
    """Work of one name or kind."""

    us: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Gap:
    """The device had nothing to do."""

    start_us: float
    """Since the start of the trace."""
    us: float
    host_us: float
    """Of it, until the next kernel was launched."""
    next_kernel: str
    """Ends the gap; empty at the end of the trace."""
    host_op: str
    """What the host was doing in the middle of the gap."""


@dataclass(frozen=True)
class Summary:
    """One trace."""

    is_device: bool
    span_us: float
    busy_us: float
    host_bound_us: float
    communication_us: float
    exposed_us: float
    kinds: Mapping[str, Total]
    names: Mapping[str, Total]
    gaps: Sequence[Gap] = field(default_factory=tuple)
    """The longest first."""

    @property
    def idle_us(self) -> float:
        """What is not busy."""
        return self.span_us - self.busy_us


def read_trace(path: Path) -> dict[str, Any]:
    """The content of a trace file (.json, .json.gz).

    Raises:
        UsageError: the file cannot be read, or is no such trace.
    """
    try:
        raw = path.read_bytes()
        content = orjson.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} is no trace of torch's profiler: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UsageError(f"{path} is no trace of torch's profiler: it has no list of traceEvents")
    return content


def rank_of(path: Path) -> int:
    """The rank that a trace was recorded on: from its name (`rank_3`, `TP-3`), else as torch noted it, else 0."""
    if found := re.search(r"rank_?(\d+)|TP-(\d+)", path.name):
        return int(found[1] or found[2])
    return int(read_trace(path).get("distributedInfo", {}).get("rank", 0))


def kind_of(name: str, category: str = "") -> str:
    """What kind of work a kernel or operator is."""
    if category in ("gpu_memcpy", "gpu_memset"):
        return COPIES
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), "other")


def summarize(content: Mapping[str, Any], *, num_gaps: int = 5) -> Summary:
    """Where the time of a trace goes.

    Args:
        content: of the file.
        num_gaps: how many of the longest gaps to describe.

    Raises:
        UsageError: nothing was recorded.
    """
    events = [event for event in content["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    device = [event for event in events if event.get("cat") in _DEVICE]
    host = [event for event in events if event.get("cat") == "cpu_op"]
    work = device or host
    if not work:
        raise UsageError("the trace holds neither kernels nor operators: nothing ran while it was recorded")
    recorded = [event for event in events if event.get("cat") in (*_DEVICE, *_LAUNCHES, "cpu_op")]
    span = (min(event["ts"] for event in recorded), max(event["ts"] + event["dur"] for event in recorded))
    busy = merged(_intervals(work))
    is_sent = [kind_of(event["name"], event["cat"]) == COMMUNICATION for event in work]
    sent = merged(_intervals(event for event, sends in zip(work, is_sent, strict=True) if sends))
    computed = merged(_intervals(event for event, sends in zip(work, is_sent, strict=True) if not sends))
    gaps = _gaps(busy, span, device, events) if device else []
    kinds, names = _totals(device, [event["dur"] for event in device]) if device else _totals(host, _self_times(host))
    longest = sorted(gaps, key=lambda gap: -gap.us)[:num_gaps]
    return Summary(
        is_device=bool(device),
        span_us=span[1] - span[0],
        busy_us=length(busy),
        host_bound_us=sum(gap.host_us for gap in gaps),
        communication_us=length(sent),
        exposed_us=length(merged(np.concatenate([sent, computed]))) - length(computed),
        kinds=kinds,
        names=names,
        gaps=[_described(gap, span[0], host) for gap in longest],
    )


def merged(intervals: Intervals) -> Intervals:
    """The union of intervals as disjoint ones, in order."""
    if not len(intervals):
        return intervals.reshape(0, 2)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    ends = np.maximum.accumulate(intervals[:, 1])
    begins = np.flatnonzero(np.r_[True, intervals[1:, 0] > ends[:-1]])
    return np.stack([intervals[begins, 0], ends[np.r_[begins[1:] - 1, len(ends) - 1]]], axis=1)


def length(disjoint: Intervals) -> float:
    """Of disjoint intervals together."""
    return float((disjoint[:, 1] - disjoint[:, 0]).sum())


def _intervals(events: Iterable[Event]) -> Intervals:
    return np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=np.float64).reshape(-1, 2)


def _totals(events: Sequence[Event], microseconds: Sequence[float]) -> tuple[dict[str, Total], dict[str, Total]]:
    """By kind and by name, the longest first."""
    kinds: dict[str, Total] = defaultdict(Total)
    names: dict[str, Total] = defaultdict(Total)
    for event, us in zip(events, microseconds, strict=True):
        for total in (kinds[kind_of(event["name"], event["cat"])], names[event["name"]]):
            total.us += us
            total.count += 1
    by_kind, by_name = ({k: d[k] for k in sorted(d, key=lambda k: -d[k].us)} for d in (kinds, names))
    return by_kind, by_name


def _self_times(host: Sequence[Event]) -> list[float]:
    """Duration of each operator without the operators that it calls in the same thread."""
    own = [float(event["dur"]) for event in host]
    stacks: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for i in sorted(range(len(host)), key=lambda i: (host[i]["ts"], -host[i]["dur"])):
        stack = stacks[host[i].get("pid"), host[i].get("tid")]
        while stack and host[stack[-1]]["ts"] + host[stack[-1]]["dur"] <= host[i]["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= host[i]["dur"]
        stack.append(i)
    return own


def _gaps(
    busy: Intervals,
    span: tuple[float, float],
    device: Sequence[Event],
    events: Iterable[Event],
) -> list[Gap]:
    """Every time that the device was idle, from the first event of the trace to the last."""
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    first_at: dict[float, Event] = {}
    for event in device:
        first_at.setdefault(float(event["ts"]), event)
    gaps = []
    for start, end in zip([span[0], *busy[:, 1]], [*busy[:, 0], span[1]], strict=True):
        if end > start:
            following = first_at.get(float(end), {})
            launch = launched.get(following.get("args", {}).get("correlation"), start) if following else end
            host_us = float(min(max(launch - start, 0.0), end - start))
            gaps.append(Gap(float(start), float(end - start), host_us, following.get("name", ""), ""))
    return gaps


def _described(gap: Gap, origin: float, host: Iterable[Event]) -> Gap:
    """The gap with a start since `origin` and the innermost operator that the host ran in its middle."""
    middle = gap.start_us + gap.us / 2
    running = [event for event in host if event["ts"] <= middle < event["ts"] + event["dur"]]
    op = min(running, key=lambda event: event["dur"])["name"] if running else "Python"
    return Gap(gap.start_us - origin, gap.us, gap.host_us, gap.next_kernel, op)
