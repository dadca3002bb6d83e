"""Recordings of a process: torch's profiler, every allocation, and how much memory is in use after a phase.

`Profiler` writes parts of a rollout's training, one file per rollout and part, for chrome://tracing or
ui.perfetto.dev: `<directory>/rollout_<id>_<target>_rank_<rank>.json.gz`. A process has one torch profiler, so parts
must not contain each other.

`MemoryRecorder` writes every allocation, with the stacks that made it, into one file (--record-memory-history).
`torch` records CUDA's caching allocator: open the file at https://docs.pytorch.org/memory_viz. `memray` records host
memory: `memray flamegraph FILE`. The file is written after so many rollouts, or at the end of the run; torch's also
when the GPU runs out of memory, which is what it is mostly for.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from slime.config.args import Args
from slime.utils import accelerator

logger = logging.getLogger(__name__)


class Profiler:
    """Records chosen parts of chosen rollouts; anything else costs nothing.

    Args:
        directory: of the traces; made when the first is written.
        rank: of this process, for the files' names.
        targets: names of the parts to record.
        rollouts: ids of the rollouts to record.
    """

    def __init__(self, directory: str | Path, *, rank: int, targets: Collection[str], rollouts: range) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._targets = frozenset(targets)
        self._rollouts = rollouts

    @contextmanager
    def record(self, target: str, rollout_id: int) -> Iterator[None]:
        """Record a block, if it is chosen; a block that raises leaves no trace."""
        if target not in self._targets or rollout_id not in self._rollouts:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if accelerator.kind() == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as trace:
            yield
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rollout_{rollout_id}_{target}_rank_{self._rank}.json.gz"
        trace.export_chrome_trace(str(path))
        logger.info("profile: %s", path)


def nothing_recorded(asked: range, done: range) -> str | None:
    """A sentence when none of the rollouts to record is among those that a run does or did."""
    if set(asked) & set(done):
        return None
    ran = f"trains on rollouts from {done[0]} to {done[-1]}" if done else "trains on no rollout"
    return (
        f"nothing is profiled: --profile-step-start {asked.start} --profile-step-end {asked.stop} name rollouts "
        f"{asked.start} to {asked.stop - 1}, and this run {ran}; change them."
    )


MAX_ENTRIES = 1_000_000  # events that torch keeps; older ones are dropped


class MemoryRecorder:
    """Records from `start` to the `num_rollouts`-th `end_rollout`, or to `finish`.

    Args:
        kind: "torch" or "memray".
        path: the file; its directories are made.
        num_rollouts: None records to the end.
    """

    def __init__(self, kind: str, path: Path, *, num_rollouts: int | None) -> None:
        self._record = _memray if kind == "memray" else _torch
        self._path, self._left = path, num_rollouts
        self._recording = ExitStack()

    def start(self) -> None:
        """Begin to record."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._recording.callback(logger.info, "memory snapshot: %s", self._path)
        self._recording.enter_context(self._record(self._path))

    def end_rollout(self) -> None:
        """Count a rollout; writes the file when it is the last one to record."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.finish()

    def finish(self) -> None:
        """Write the file and stop, unless that is done already."""
        self._recording.close()


@contextmanager
def _torch(path: Path) -> Iterator[None]:
    import torch

    def out_of_memory(device: int, asked: int, reserved: int, free: int) -> None:
        own = path.with_name(f"oom_{path.name}")
        logger.error("GPU %d is out of memory (%d bytes asked, %d free); snapshot: %s", device, asked, free, own)
        torch.cuda.memory._dump_snapshot(str(own))

    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
    torch._C._cuda_attach_out_of_memory_observer(out_of_memory)
    yield
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def _memray(path: Path) -> AbstractContextManager[Any]:
    memray = importlib.import_module("memray")
    tracker: AbstractContextManager[Any] = memray.Tracker(
        destination=memray.FileDestination(str(path), overwrite=True)
    )
    return tracker


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


GB = 1e9


def memory_after(phase: str) -> dict[str, float]:
    """`memory/after_<phase>/<what>` in GB (1e9 bytes).

    `host_rss_gb` is this process's resident memory. With CUDA also `gpu_used_gb`, what all processes hold of this
    process's GPU, `gpu_process_gb`, what this process alone holds (where the driver tells processes apart), and
    `torch_allocated_gb` and `torch_reserved_gb` of this process (both count memory that is put away by
    torch_memory_saver as if it were there).
    """
    found = {"host_rss_gb": psutil.Process().memory_info().rss}
    if accelerator.kind() == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        found["gpu_used_gb"] = total - free
        if (own := accelerator.process_bytes()) is not None:
            found["gpu_process_gb"] = own
        found["torch_allocated_gb"] = torch.cuda.memory_allocated()
        found["torch_reserved_gb"] = torch.cuda.memory_reserved()
    return {f"memory/after_{phase}/{name}": num_bytes / GB for name, num_bytes in found.items()}
