"""Which collective of torch.distributed this process is in, or was seen in last, and how many each group has begun.

Nothing is recorded while collectives run: `CollectiveState.look`, called every now and then from another thread, reads
the stacks of this process. The number of operations that each group has begun comes from torch; the rank with the
lowest one is the rank that others wait for.
"""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

_MODULE = "torch/distributed/distributed_c10d.py"


class CollectiveState:
    """What was seen so far."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._since = 0.0

    def look(self) -> dict[str, Any]:
        """{"last": the collective that was seen last, "begun": {group: operations}}; empty without process groups."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return {}
        found = next(filter(None, map(_collective_in, sys._current_frames().values())), None)
        now = time.time()
        if found is not None:
            is_same = self._last is not None and self._last["call"] == found
            self._since = self._since if is_same else now
            self._last = {"call": found, "seen": _clock(now), "in_it": True, "since": _clock(self._since)}
        elif self._last is not None:
            self._last["in_it"] = False
        return {"last": dict(self._last) if self._last else None, "begun": _begun(dist)}


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _collective_in(frame: FrameType | None) -> str | None:
    """The function of torch.distributed that a stack is in, and the line outside torch that called it."""
    name = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_MODULE) and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name
        elif name is not None and "/torch/" not in file:
            return f"{name} at {'/'.join(file.split('/')[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return name


def _begun(dist: Any) -> dict[str, int]:
    """Operations that each process group of this rank has begun, as far as its backend counts them."""
    counts = {}
    for group in list(dist.distributed_c10d._world.pg_names):
        try:
            counts[str(group.group_desc or group.group_name)] = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue  # not every backend counts
    return counts
