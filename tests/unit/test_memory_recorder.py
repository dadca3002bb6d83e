"""--record-memory-history: from when to when memory is recorded, and into which file."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.observability.profiler import MemoryRecorder, recorder_of


class FakeTracker:
    """memray is not installed for the tests; what it is called with is all that is ours."""

    def __init__(self, destination):
        self.path = Path(destination[0])

    def __enter__(self):
        self.path.write_text("recording")

    def __exit__(self, *_):
        self.path.write_text("done")


@pytest.fixture(autouse=True)
def memray(monkeypatch):
    fake = SimpleNamespace(Tracker=FakeTracker, FileDestination=lambda path, overwrite: (path, overwrite))
    monkeypatch.setitem(sys.modules, "memray", fake)


def flags(tmp_path: Path, **changes):
    defaults = {
        "record_memory_history": True,
        "memory_recorder": "memray",
        "memory_snapshot_dir": str(tmp_path / "snapshots"),
        "memory_snapshot_path": "heap.bin",
        "memory_snapshot_num_steps": None,
    }
    return Namespace(**(defaults | changes))


def test_each_rank_records_into_a_file_of_its_own_until_the_end(tmp_path: Path):
    recorder = recorder_of(flags(tmp_path), 3)
    recorder.start()
    file = tmp_path / "snapshots" / "rank3_heap.bin"
    recorder.end_rollout()
    assert file.read_text() == "recording"
    recorder.finish()
    assert file.read_text() == "done"


def test_a_critic_records_beside_its_actor(tmp_path: Path):
    recorder = recorder_of(flags(tmp_path), 3, role="critic")
    recorder.start()
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["critic_rank3_heap.bin"]


def test_a_number_of_rollouts_ends_the_record(tmp_path: Path):
    recorder = recorder_of(flags(tmp_path, memory_snapshot_num_steps=2), 0)
    recorder.start()
    file = tmp_path / "snapshots" / "rank0_heap.bin"
    recorder.end_rollout()
    assert file.read_text() == "recording"
    recorder.end_rollout()
    assert file.read_text() == "done"
    file.unlink()
    recorder.end_rollout()
    recorder.finish()
    assert not file.exists(), "written once"


def test_nothing_is_recorded_without_the_flag(tmp_path: Path):
    assert recorder_of(flags(tmp_path, record_memory_history=False), 0) is None


def test_torch_records_cuda_and_also_writes_when_the_gpu_is_full(tmp_path: Path, monkeypatch):
    """Without a GPU: the order of the calls. On one, see docs/debugging.md for the command."""
    calls, observers = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: calls.append(("record", a, k)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    recorder = MemoryRecorder("torch", tmp_path / "a.pickle", num_rollouts=1)
    recorder.start()
    observers[0](0, 10, 0, 5)
    recorder.end_rollout()
    assert calls[1:] == [
        ("dump", str(tmp_path / "oom_a.pickle")),
        ("dump", str(tmp_path / "a.pickle")),
        ("record", (), {"enabled": None}),
    ]
    assert calls[0][0] == "record" and calls[0][2]["max_entries"] > 0
