"""Ends what a run leaves behind, however it ends: `python -m slime.processes.sweeper RUN RECORD DRIVER_PID`.

A process of its own, for a driver that is killed outright can clean up nothing. It looks at the run's processes
(`slime.processes.registry`) every few seconds, for one that is gone cannot be asked which shared memory it had. When
the driver has ended, or says on standard input that the run has (though its process may go on), whatever is left of
the run after a grace period is killed, its shared memory is removed, and so is the folder of the Ray that the run had
started, whose logs are kept with the run's where it did not end well. An engine's memory that was never seen is known
by its name. The sweeper ends nothing without the run's mark.

Driver and sweeper write down what a run holds in its record: a directory of the run's name, with a symbolic link for
each fact. "output_dir" and "ray" (a folder) are the run's, "well" says that it ended well, and "memory_INODE" is
shared memory: a file of the same name may be somebody else's later. A link is made at once or not at all.

Where driver and sweeper are killed together, the next run of the same user on this host sweeps (`sweep_dead_runs`).
Both keep the record locked; the kernel gives the lock back when the last of them has ended, so whoever can take it
knows that the run is dead. (Process numbers would not do: containers may share /tmp, and each has numbers of its own.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from slime.processes.directories import claim, is_claimed, make_own_directory
from slime.processes.registry import (
    SHARED_MEMORY,
    is_alive,
    left_by_engines,
    processes_of,
    remove_unused,
    shared_memory_of,
)

logger = logging.getLogger(__name__)

# How the name of a folder begins that holds the Ray of a run and nothing else; a sweep removes no other folder.
RAY_PREFIX = "slime-ray-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
POLL_S = 0.5
LOOK_S = 5.0
GRACE_S = 4.0
KILL_S = 3.0


def directory() -> Path:
    """Return the directory of this user's records since this kernel has started, which nobody else can write to.

    A lock says nothing about a process under another kernel, which may see the same files: another host, a sandbox.

    Raises:
        OSError: there is no such directory, and it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"slime-runs-{os.getuid()}-{_BOOT.read_text()[:8]}"
    make_own_directory(path)
    return path


def begin_record(run: str, output_dir: Path) -> tuple[Path, int | None]:
    """Make the record of a run that begins; the run lives for as long as a process has its descriptor open.

    Returns:
        (the record, the descriptor that locks it); without a lock, or without a place where other runs look, the
        descriptor is None, and only driver and sweeper know of the record.
    """
    lock = None
    try:
        record = directory() / f".{run}"  # another run must not find it before it is locked
        record.mkdir()
        if (lock := claim(record)) is not None:
            record = record.rename(record.with_name(run))
    except OSError as error:
        logger.debug("no other run will find the record of this one: %s", error)
        record = Path(tempfile.gettempdir()) / f".slime-run-{run}"
        with contextlib.suppress(OSError):  # where there is no room, notes are lost
            record.mkdir(mode=0o700)
    note(record, "output_dir", output_dir)
    return record, lock


def note(record: Path, name: str, path: Path) -> None:
    """Add something to a record, once."""
    with contextlib.suppress(OSError):
        (record / name).symlink_to(path)


def noted(record: Path, name: str) -> Path | None:
    """Return what a record says; None where it says nothing."""
    with contextlib.suppress(OSError):
        return (record / name).readlink()
    return None


def _memory_link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"memory_{path.stat().st_ino}"
    return "memory_gone"


def memory_left(record: Path) -> list[Path]:
    """Return what is left of the shared memory of a run."""
    return [link.readlink() for link in record.glob("memory_*") if link.name == _memory_link(link)]


def records() -> list[Path]:
    """Return the records of this user's runs on this host; none where others could have written them."""
    with contextlib.suppress(OSError):
        return sorted(directory().glob("[!.]*"))
    return []


def live_output_dirs() -> list[Path]:
    """Return the output directories of this user's runs on this host of which driver or sweeper lives."""
    found = [noted(record, "output_dir") for record in records() if is_claimed(record)]
    return [path for path in found if path is not None]


class Sweeper:
    """The driver's side.

    Args:
        run: mark of the run.
        output_dir: of the run; where the logs of its Ray go if it fails.
    """

    def __init__(self, run: str, output_dir: Path) -> None:
        root = str(Path(__file__).resolve().parent.parent.parent)
        self.record, lock = begin_record(run, output_dir)  # locked for as long as this process lives
        # A session of its own: Ctrl-C at the terminal must not end it. Nobody waits for it: it outlives the driver.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, run, str(self.record), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )

    def sweep(self) -> None:
        """Say that the run has ended; nothing happens when the sweeper is gone."""
        if (pipe := self._process.stdin) is not None:
            with contextlib.suppress(OSError):
                os.write(pipe.fileno(), b"\n")


class _Seen:
    """Processes of the run and their shared memory, as far as they were seen."""

    def __init__(self, run: str, ignored: set[int], begin: float) -> None:
        self._run = run
        self._ignored = ignored
        self._begin = begin
        self._processes: dict[int, psutil.Process] = {}
        self.memory: set[Path] = set()

    def look(self) -> list[psutil.Process]:
        """Those that are alive; psutil knows a process from another one that got its number."""
        for process in processes_of(self._run):
            if process.pid not in self._ignored:
                self._processes[process.pid] = process
        alive = [process for process in self._processes.values() if is_alive(process)]
        self.memory |= shared_memory_of(self._processes, since=self._begin)
        return alive


def main(run: str, record: Path, driver_pid: int) -> None:
    """Wait for the end of the run, then sweep."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)
    begin = psutil.Process().create_time()
    seen = _Seen(run, {driver_pid, os.getpid()}, begin)
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended before this had begun
        _wait_for_end(record, psutil.Process(driver_pid), seen)
    _end(seen)
    _remove(record, seen.memory | left_by_engines(since=begin))


def _wait_for_end(record: Path, driver: psutil.Process, seen: _Seen) -> None:
    next_look = time.monotonic()
    while is_alive(driver) and not select.select([sys.stdin], [], [], POLL_S)[0]:
        if time.monotonic() >= next_look:
            seen.look()
            for path in seen.memory:
                note(record, _memory_link(path), path)
            next_look = time.monotonic() + LOOK_S


def _remove(record: Path, memory: Iterable[Path] = ()) -> tuple[list[Path], Path | None]:
    """Remove what a run of which no process is left has held, and its record; returns its shared memory and the
    folder of its Ray, as far as they were there."""
    removed = remove_unused([*memory, *memory_left(record)])
    ray, output_dir = noted(record, "ray"), noted(record, "output_dir")
    was_there = ray is not None and ray.is_dir()
    if ray is not None:
        keeps_logs = output_dir is not None and noted(record, "well") is None
        _remove_ray(ray, output_dir / "logs" / "ray" if output_dir is not None and keeps_logs else None)
    shutil.rmtree(record, ignore_errors=True)
    return removed, ray if was_there else None


def _end(seen: _Seen) -> None:
    """Let what is left of the run end by itself for a while, then kill it."""
    end = time.monotonic() + GRACE_S
    while seen.look() and time.monotonic() < end:
        time.sleep(0.2)
    _kill(seen)


def _kill(seen: _Seen) -> int:
    """Kill what is left of a run; returns how many processes that were at first."""
    end, first = time.monotonic() + KILL_S, len(alive := seen.look())
    while alive and time.monotonic() < end:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
        alive = seen.look()
    return first


def _remove_ray(folder: Path, keep_logs_at: Path | None) -> None:
    """Remove the folder of a Ray; its logs move elsewhere first where they are to be kept.

    All that is in the folder goes, so another folder than one which a run has made for its Ray is left as it is.
    """
    if not folder.name.startswith(RAY_PREFIX):
        return
    logs = (folder / "ray" / "session_latest" / "logs").resolve()
    if keep_logs_at is not None and logs.is_dir() and logs.is_relative_to(folder.resolve()):
        with contextlib.suppress(OSError):
            keep_logs_at.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(keep_logs_at, ignore_errors=True)
            shutil.move(str(logs), str(keep_logs_at))
    shutil.rmtree(folder, ignore_errors=True)


def sweep_dead_runs() -> list[str]:
    """Remove what is left of this user's runs that were killed together with their sweepers; returns a sentence for
    each of which something was."""
    said, here = [], {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    for record in records():
        with contextlib.suppress(BlockingIOError):  # it lives
            if (lock := claim(record)) is None:
                continue
            output_dir = noted(record, "output_dir")
            processes = _kill(_Seen(record.name, here, begin=time.time()))
            memory, ray = _remove(record)
            os.close(lock)
            if processes or memory or ray:
                said.append(
                    f"a run that was killed with its sweeper ({output_dir}) had left {processes} processes, "
                    f"{len(memory)} files in {SHARED_MEMORY} and {ray or 'no folder'} of Ray: they are removed"
                )
    return said


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
