"""What the registry starts ends with its children: on request, at exit, on a signal, when the starter is killed."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.processes.registry import ProcessRegistry, log_tail, newest_line

# A parent whose child sleeps; both ids are in its log. The child is in a session of its own, so only the tree finds
# it.
FAMILY = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(600)\n"
)
STARTER = (
    "import sys, time\n"
    "from slime.processes.registry import registry\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "print(registry().start(sleep, name='sleeper', log_path=sys.argv[1]).pid, flush=True)\n"
)


def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_family(registry: ProcessRegistry, log: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    process = registry.start([sys.executable, "-c", FAMILY], name="family", log_path=log)
    until(lambda: log.read_text().endswith("\n"))
    return process, [int(pid) for pid in log.read_text().split()]


def test_ending_a_process_ends_its_children(tmp_path: Path) -> None:
    registry = ProcessRegistry()
    process, pids = start_family(registry, tmp_path / "logs" / "family.log")
    assert pids[0] == process.pid, "the wrapper becomes the command, it does not stay in between"
    assert registry.running() == ["family"]
    registry.end(process)
    assert all(is_gone(pid) for pid in pids)
    assert registry.running() == []


def test_killed_children_are_gone_with_what_they_held(tmp_path: Path) -> None:
    registry, log = ProcessRegistry(), tmp_path / "family.log"
    holds = "import time; held = b'x' * 2**28; print('holds', flush=True); time.sleep(600)"  # freeing it takes a while
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    process = registry.start([sys.executable, "-c", parent], name="family", log_path=log)
    until(lambda: "holds" in log.read_text())
    children = psutil.Process(process.pid).children()
    registry.end(process, grace_s=0.0)
    assert children and all(is_gone(child.pid) for child in children)


def test_a_child_whose_first_thread_has_ended_is_ended_too(tmp_path: Path) -> None:
    registry, log = ProcessRegistry(), tmp_path / "family.log"
    number = 60 if platform.machine() == "x86_64" else 93  # of exit, which ends the thread that calls it alone
    child = (
        "import ctypes, signal, threading, time; signal.signal(15, signal.SIG_IGN);"
        "threading.Thread(target=time.sleep, args=(600,)).start();"
        f"print('started', flush=True); ctypes.CDLL(None).syscall({number}, 0)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = registry.start([sys.executable, "-c", parent], name="family", log_path=log)
    until(lambda: "started" in log.read_text())
    (found,) = psutil.Process(process.pid).children()
    until(lambda: found.status() == psutil.STATUS_ZOMBIE)
    assert found.num_threads() == 2
    registry.end(process, grace_s=0.1)
    until(lambda: not found.is_running() or found.num_threads() < 2, 1.0)


def test_what_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    registry, log = ProcessRegistry(), tmp_path / "deaf.log"
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    process = registry.start([sys.executable, "-c", deaf], name="deaf", log_path=log)
    until(lambda: "deaf" in log.read_text())
    registry.end_all(grace_s=0.2)
    assert process.returncode == -signal.SIGKILL


def test_a_process_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    # The kernel's parent-death signal follows the forking thread; Ray runs methods on threads that come and go.
    registry, started = ProcessRegistry(), []
    thread = threading.Thread(target=lambda: started.append(start_family(registry, tmp_path / "log")))
    thread.start()
    thread.join()
    time.sleep(0.2)
    process, _ = started[0]
    assert process.poll() is None
    registry.end(process)


@pytest.mark.parametrize("how", ["exit", "SIGTERM", "SIGINT", "SIGKILL", "exception"])
def test_nothing_outlives_the_starter(tmp_path: Path, how: str) -> None:
    ending = {"exit": "", "exception": "raise SystemError"}.get(how, "time.sleep(600)")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER + ending, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    if how.startswith("SIG"):
        starter.send_signal(getattr(signal, how))
    starter.wait(15)
    until(lambda: is_gone(pid))


def test_the_newest_line_of_logs_is_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    logs = [tmp_path / "engine_0.log", tmp_path / "engine_1.log"]
    assert newest_line([], since=0) == ""
    for age, log in enumerate(logs):
        log.write_text("begin\nwarm-up: 0%\rwarm-up: 1%\n\x1b[A")
        os.utime(log, (100 - age, 100 - age))
    assert newest_line(logs, since=100) == "engine_0.log: warm-up: 1%"
    assert newest_line(logs, since=101) == "", "they are of an earlier run"


def test_the_log_tail_has_the_last_lines_and_a_missing_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert log_tail(log, lines=2) == "line 998\nline 999"
    assert "absent.log does not exist" in log_tail(tmp_path / "absent.log")
