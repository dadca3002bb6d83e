"""What a host's kernel says of its memory, in both versions of control groups."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from slime.processes import progress as module
from slime.processes.progress import host_memory, killed_for_memory, memory_kills, too_few_addresses

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that says nothing yet."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(module, "_KERNEL", tmp_path / "vmstat")
    (tmp_path / "memory").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(("text", "found"), [("max", PHYSICAL), (str(2**63 - 4096), PHYSICAL), (str(2**30), 2**30)])
def test_a_container_has_what_it_may_take(kernel: Path, name: str, text: str, found: int) -> None:
    assert host_memory() == PHYSICAL
    (kernel / name).write_text(text + "\n")
    assert host_memory() == found


@pytest.mark.parametrize("name", ["memory.events", "memory/memory.oom_control", "vmstat"])
def test_processes_that_the_kernel_kills_are_counted_from_now_on(kernel: Path, name: str) -> None:
    (kernel / name).write_text("oom 4\noom_kill 3\n")
    kills = memory_kills()
    assert killed_for_memory(kills) is None
    (kernel / name).write_text("oom 9\noom_kill 5\n")
    said = killed_for_memory(kills)
    assert said is not None and said.startswith("out of host memory: the kernel's out-of-memory killer has ended 2")


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Resource temporarily unavailable",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "std::bad_alloc",
    ],
)
def test_a_limit_of_the_address_space_is_named_where_a_process_ran_into_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (9 * 10**9, resource.RLIM_INFINITY))
    assert too_few_addresses(text) == "`ulimit -v` lets a process map 9.0 GB only; lift it: ulimit -v unlimited"
    assert too_few_addresses("ValueError: no such model") is None
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert too_few_addresses(text) is None
