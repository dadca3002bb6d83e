"""Whatever ends a run, its processes and its shared memory are gone ten seconds later, and nobody else's are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.processes import sweeper as sweeper_module
from slime.processes.registry import MARK, SHARED_MEMORY, is_alive, processes_of, remove_unused, shared_memory_of
from slime.processes.sweeper import GRACE_S, KILL_S, POLL_S, _remove_ray, sweep_dead_runs

pytestmark = pytest.mark.processes
NET_S = 60.0
# A driver that starts a child in a session of its own, which writes over its environment and holds shared memory, and
# a grandchild. (A stray environment: only the parent says whose it is.)
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from slime.processes.registry import begin_run
from slime.processes.sweeper import Sweeper, note
run = begin_run()
sweeper = Sweeper(run, Path(sys.argv[1]))
note(sweeper.record, "ray", Path(sys.argv[2]))
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
if "well" in sys.argv[4:]:
    note(sweeper.record, "well", Path(sys.argv[1]))
if "stay" in sys.argv[4:]:
    sweeper.sweep()
    time.sleep(600)
"""


def until(condition: Callable[[], object], deadline_s: float = NET_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def start(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], str, Path]:
    folder = tmp_path / "slime-ray-1"
    session = folder / "ray" / "session_1"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "raylet.err").write_text("why")
    (session.parent / "session_latest").symlink_to(session)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "out"), str(folder), *more]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, driver.stdout.readline().strip(), folder


def test_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {MARK: "another"}
    )
    driver, run, folder = start(tmp_path, "600")
    segment = SHARED_MEMORY / f"slime_test_{run}"
    found = processes_of(run)
    assert len([one for one in found if one.ppid() in {driver.pid, *[p.pid for p in found]}]) >= 2
    time.sleep(1.0)  # the sweeper has looked once
    driver.send_signal(signal.SIGKILL)
    driver.wait(5)
    until(lambda: not [one for one in found if is_alive(one)])
    until(lambda: not segment.exists() and not folder.exists())
    assert (tmp_path / "out" / "logs" / "ray" / "raylet.err").read_text() == "why"
    assert other.poll() is None, "a process of another run was ended"
    other.kill()
    other.wait(5)


def children_named(pid: int, word: str) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children() if word in one.cmdline()]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs of this test have their records; not where this user's own are."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(sweeper_module.tempfile, "tempdir", None)
    found = sweeper_module.directory()
    found.rmdir()
    return found


def test_the_logs_of_ray_and_the_record_go_with_a_run_that_ended_well(records: Path, tmp_path: Path) -> None:
    driver, run, folder = start(tmp_path, "0.5", "well")
    assert (records / run).exists()
    assert driver.wait(20) == 0
    until(lambda: not processes_of(run) and not folder.exists() and not list(records.iterdir()))
    assert not (tmp_path / "out").exists()


def test_a_driver_that_goes_on_after_its_run_has_ended_is_left_alone(records: Path, tmp_path: Path) -> None:
    driver, run, folder = start(tmp_path, "0.5", "stay")
    until(lambda: not processes_of(run) and not folder.exists() and not list(records.iterdir()))
    assert driver.poll() is None and (tmp_path / "out" / "logs" / "ray" / "raylet.err").exists()
    driver.kill()
    driver.wait(5)


def test_the_next_run_sweeps_what_a_run_left_that_was_killed_with_its_sweeper(records: Path, tmp_path: Path) -> None:
    driver, run, folder = start(tmp_path, "600")
    segment, record = SHARED_MEMORY / f"slime_test_{run}", records / run
    until(lambda: segment in [link.readlink() for link in record.glob("memory_*")])
    assert (record / "ray").readlink() == folder
    assert sweep_dead_runs() == [] and folder.exists(), "it lives"
    sweeper = children_named(driver.pid, "slime.processes.sweeper")[0]
    left = [one for one in processes_of(run) if one.pid not in (driver.pid, sweeper.pid)]
    driver.send_signal(signal.SIGSTOP)  # it shall not see the end of its sweeper
    sweeper.kill()
    assert sweep_dead_runs() == [] and folder.exists(), "its driver lives"
    driver.kill()
    driver.wait(5)
    until(lambda: not is_alive(sweeper))
    assert segment.exists() and [one for one in left if one.is_running()], "nobody was there to sweep"
    (said,) = sweep_dead_runs()
    assert f"({tmp_path / 'out'}) had left" in said and "1 files in /dev/shm" in said and str(folder) in said
    assert not segment.exists() and not folder.exists() and not processes_of(run)
    assert (tmp_path / "out" / "logs" / "ray" / "raylet.err").read_text() == "why"
    assert not list(records.iterdir()) and sweep_dead_runs() == []


def test_records_that_others_could_have_written_are_not_believed(records: Path) -> None:
    records.mkdir()
    (records / "1234").mkdir()
    records.chmod(0o777)
    assert sweeper_module.records() == []
    unlocked, lock = sweeper_module.begin_record("5678", Path("/out"))
    assert lock is None and unlocked.parent != records, "driver and sweeper have one elsewhere"
    records.chmod(0o700)
    assert sweeper_module.records() == [records / "1234"]
    assert sweep_dead_runs() == [] and not list(records.iterdir()), "nothing was left of that run"


def test_what_a_killed_run_left_is_swept_also_where_no_other_run_would_find_its_record(
    records: Path, tmp_path: Path
) -> None:
    records.mkdir()
    records.chmod(0o777)
    driver, run, folder = start(tmp_path, "600")
    assert list(records.parent.glob(f".*{run}")) and not list(records.iterdir())
    driver.kill()
    driver.wait(5)
    until(lambda: not processes_of(run) and not folder.exists() and not list(records.parent.glob(f".*{run}")))
    assert (tmp_path / "out" / "logs" / "ray" / "raylet.err").read_text() == "why"


def test_a_record_that_cannot_be_locked_is_not_shown_to_other_runs(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the run for dead."""
    monkeypatch.setattr(sweeper_module, "claim", lambda _: None)  # as where the file system has no locks
    record, lock = sweeper_module.begin_record("1234", Path("/out"))
    assert lock is None and sweeper_module.noted(record, "output_dir") == Path("/out")
    assert sweeper_module.records() == []


def test_a_file_that_has_taken_the_name_of_a_dead_runs_memory_is_somebody_elses(records: Path) -> None:
    names = [SHARED_MEMORY / f"slime_{name}_{os.getpid()}" for name in ("kept", "made_again", "gone")]
    record, lock = sweeper_module.begin_record("1234", Path("/out"))
    assert lock is not None
    for path in names:
        path.write_text("x")
        sweeper_module.note(record, f"memory_{path.stat().st_ino}", path)
    assert sweeper_module.live_output_dirs() == [Path("/out")] and sweep_dead_runs() == []
    other = names[1].with_name(names[1].name + "_new")
    other.write_text("y")
    other.replace(names[1])
    names[2].unlink()
    os.close(lock)
    assert sweeper_module.live_output_dirs() == [] and sweeper_module.memory_left(record) == names[:1]
    (said,) = sweep_dead_runs()
    assert "1 files in /dev/shm" in said and not names[0].exists() and names[1].exists() and not record.exists()
    names[1].unlink()


def test_nothing_outside_of_dev_shm_is_taken_for_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    assert remove_unused([tmp_path / "model"]) == [] and (tmp_path / "model").exists()


def test_shared_memory_that_somebody_uses_stays(tmp_path: Path) -> None:
    used, unused = SHARED_MEMORY / f"slime_used_{os.getpid()}", SHARED_MEMORY / f"torch_{os.getpid()}_slime"
    begin = time.time() - 1.0  # the clock of file systems ticks more coarsely
    with used.open("w") as _:
        unused.write_text("x")
        assert {used, unused} <= shared_memory_of([os.getpid()], since=begin)
        assert remove_unused([used, unused, SHARED_MEMORY / "is_not_there"]) == [unused]
        assert used.exists()
    assert remove_unused([used]) == [used]


def test_files_of_a_user_in_dev_shm_stay_when_a_process_that_reads_them_is_ended() -> None:
    """A model is often copied there, for it then loads faster."""
    folder, data, own = (SHARED_MEMORY / f"slime_{name}_{os.getpid()}" for name in ("model", "data.jsonl", "own"))
    folder.mkdir()
    files = [folder / "model.safetensors", data, own]
    reader = "import sys, time; kept = [open(path, 'a') for path in sys.argv[1:]]; print(flush=True); time.sleep(600)"
    for path in files[:2]:
        path.write_text("x")
    begin = time.time() + 0.5
    time.sleep(0.6)
    with subprocess.Popen([sys.executable, "-c", reader, *map(str, files)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        found = shared_memory_of([process.pid], since=begin)
        process.kill()
    assert remove_unused(found) == [own] and data.exists() and files[0].exists()
    data.unlink()
    shutil.rmtree(folder)


def test_the_memory_of_an_engine_that_was_killed_before_the_sweeper_looked_is_removed(tmp_path: Path) -> None:
    """Nothing but its name leads to it; what a living engine holds, and what was left before the run, stays."""
    names = ("unseen", "in_use", "old")
    unseen, in_use, old = (SHARED_MEMORY / f"sglang_loads_slime_{name}_{os.getpid()}.shm" for name in names)
    old.write_text("x")
    os.utime(old, (0, 0))
    with in_use.open("w"):
        driver, _, folder = start(tmp_path, "600")
        for path in (unseen, in_use):
            path.write_text("x")
        driver.send_signal(signal.SIGKILL)
        driver.wait(5)
        until(lambda: not unseen.exists() and not folder.exists())
        assert in_use.exists() and old.exists()
    in_use.unlink()
    old.unlink()


def test_a_folder_that_no_run_has_made_for_its_ray_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "ray" / "session_latest" / "logs").mkdir(parents=True)
    _remove_ray(tmp_path, tmp_path / "kept")
    assert (tmp_path / "ray" / "session_latest" / "logs").is_dir() and not (tmp_path / "kept").exists()


def test_what_the_sweeper_waits_for_is_less_than_ten_seconds() -> None:
    assert POLL_S + GRACE_S + KILL_S < 10


@pytest.mark.parametrize("run", ["", "0" * 16])
def test_no_process_belongs_to_a_run_that_is_not_there(run: str) -> None:
    assert not processes_of(run)
