"""Whatever ends a run, its processes and its shared memory are gone ten seconds later, and nobody else's are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.utils.run_processes import MARK, SHARED_MEMORY, processes_of, remove_unused, shared_memory_of
from slime.utils.sweeper import GRACE_S, KILL_S, POLL_S, _remove_session

NET_S = 60.0
# A driver that starts a child in a session of its own, which writes over its environment and holds shared memory, and
# a grandchild. (A stray environment: only the parent says whose it is.)
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from slime.utils.run_processes import begin_run
from slime.utils.sweeper import Sweeper
run = begin_run()
sweeper = Sweeper(run, Path(sys.argv[1]))
sweeper.say("session " + sys.argv[2])
child = '''
import mmap, os, subprocess, sys, time
file = open("/dev/shm/slime_test_" + sys.argv[1], "w+b")
file.truncate(4096)
held = mmap.mmap(file.fileno(), 4096)
file.close()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
print("ready", flush=True)
time.sleep(600)
'''
started = subprocess.Popen([sys.executable, "-c", child, run], stdout=subprocess.PIPE, start_new_session=True)
started.stdout.readline()
print(run, flush=True)
time.sleep(float(sys.argv[3]))
if sys.argv[4:]:
    sweeper.say(sys.argv[4])
"""


def until(condition: Callable[[], object], deadline_s: float = NET_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def start(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], str, Path]:
    session = tmp_path / "ray" / "session_1"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "raylet.err").write_text("why")
    (session.parent / "session_latest").symlink_to(session)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "out"), str(session), *more]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, driver.stdout.readline().strip(), session


def test_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {MARK: "another"}
    )
    driver, run, session = start(tmp_path, "600")
    segment = SHARED_MEMORY / f"slime_test_{run}"
    found = processes_of(run)
    assert len([one for one in found if one.ppid() in {driver.pid, *[p.pid for p in found]}]) >= 2
    time.sleep(1.0)  # the sweeper has looked once
    driver.send_signal(signal.SIGKILL)
    driver.wait(5)
    until(lambda: not [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    until(lambda: not segment.exists() and not session.exists())
    assert (tmp_path / "out" / "logs" / "ray" / "raylet.err").read_text() == "why"
    assert not (session.parent / "session_latest").is_symlink()
    assert other.poll() is None, "a process of another run was ended"
    other.kill()
    other.wait(5)


def test_the_logs_of_ray_go_with_a_run_that_ended_well(tmp_path: Path) -> None:
    driver, run, session = start(tmp_path, "0.5", "well")
    assert driver.wait(20) == 0
    until(lambda: not processes_of(run) and not session.exists())
    assert not (tmp_path / "out").exists()


def test_shared_memory_that_somebody_uses_stays(tmp_path: Path) -> None:
    used, unused = SHARED_MEMORY / f"slime_used_{os.getpid()}", SHARED_MEMORY / f"torch_{os.getpid()}_slime"
    with used.open("w") as _:
        unused.write_text("x")
        assert {used, unused} <= shared_memory_of([os.getpid()])
        assert remove_unused([used, unused, SHARED_MEMORY / "is_not_there"]) == [unused]
        assert used.exists()
    assert remove_unused([used]) == [used]


def test_the_memory_of_an_engine_that_was_killed_before_the_sweeper_looked_is_removed(tmp_path: Path) -> None:
    """Nothing but its name leads to it; what a living engine holds, and what was left before the run, stays."""
    names = ("unseen", "in_use", "old")
    unseen, in_use, old = (SHARED_MEMORY / f"sglang_loads_slime_{name}_{os.getpid()}.shm" for name in names)
    old.write_text("x")
    os.utime(old, (0, 0))
    with in_use.open("w"):
        driver, _, session = start(tmp_path, "600")
        for path in (unseen, in_use):
            path.write_text("x")
        driver.send_signal(signal.SIGKILL)
        driver.wait(5)
        until(lambda: not unseen.exists() and not session.exists())
        assert in_use.exists() and old.exists()
    in_use.unlink()
    old.unlink()


def test_the_session_of_another_ray_that_is_the_latest_now_keeps_its_link(tmp_path: Path) -> None:
    ours, others = tmp_path / "session_1", tmp_path / "session_2"
    ours.mkdir()
    others.mkdir()
    (tmp_path / "session_latest").symlink_to(others)
    _remove_session(ours, None)
    assert not ours.exists() and (tmp_path / "session_latest").resolve() == others


def test_what_the_sweeper_waits_for_is_less_than_ten_seconds() -> None:
    assert POLL_S + GRACE_S + KILL_S < 10


@pytest.mark.parametrize("run", ["", "0" * 16])
def test_no_process_belongs_to_a_run_that_is_not_there(run: str) -> None:
    assert not processes_of(run)
