"""Recording every allocation of a process, with the stacks that made it, into one file (--record-memory-history).

`torch` records CUDA's caching allocator: open the file at https://docs.pytorch.org/memory_viz. `memray` records host
memory: `memray flamegraph FILE`. The file is written after so many rollouts, or at the end of the run; torch's also
when the GPU runs out of memory, which is what it is mostly for. It knows nothing about what is recorded.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from slime.config.args import Args

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1_000_000
"""Events that torch keeps; older ones are dropped."""


class MemoryRecorder:
    """Records from `start` to the `num_rollouts`-th `end_rollout`, or to `finish`.

    Args:
        kind: "torch" or "memray".
        path: the file; its directories are made.
        num_rollouts: None records to the end.
    """

    def __init__(self, kind: str, path: Path, *, num_rollouts: int | None) -> None:
        self._backend: _Torch | _Memray = _Memray(path) if kind == "memray" else _Torch(path)
        self._path, self._left = path, num_rollouts
        self._is_recording = False

    def start(self) -> None:
        """Begin to record."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._backend.start()
        self._is_recording = True

    def end_rollout(self) -> None:
        """Count a rollout; writes the file when it is the last one to record."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.finish()

    def finish(self) -> None:
        """Write the file and stop, unless that is done already."""
        if self._is_recording:
            self._is_recording = False
            self._backend.finish()
            logger.info("memory snapshot: %s", self._path)


class _Torch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)

    def finish(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, device: int, asked: int, reserved: int, free: int) -> None:
        path = self._path.with_name(f"oom_{self._path.name}")
        logger.error("GPU %d is out of memory (%d bytes asked, %d free); snapshot: %s", device, asked, free, path)
        torch.cuda.memory._dump_snapshot(str(path))


class _Memray:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracker: Any = None

    def start(self) -> None:
        memray = importlib.import_module("memray")
        self._tracker = memray.Tracker(destination=memray.FileDestination(str(self._path), overwrite=True))
        self._tracker.__enter__()

    def finish(self) -> None:
        self._tracker.__exit__(None, None, None)


def recorder_of(args: Args, rank: int, *, role: str = "actor") -> MemoryRecorder | None:
    """The recorder that the flags ask for, of this rank's own file; None without --record-memory-history.

    Args:
        args: the `memory_*` flags and `record_memory_history`.
        rank: of the trainer.
        role: "actor" or "critic", which has files beside the actor's.
    """
    if not args.record_memory_history:
        return None
    path = Path(args.memory_snapshot_dir) / args.memory_snapshot_path
    prefix = "" if role == "actor" else f"{role}_"
    path = path.with_name(f"{prefix}rank{rank}_{path.name}")
    return MemoryRecorder(args.memory_recorder, path, num_rollouts=args.memory_snapshot_num_steps)
