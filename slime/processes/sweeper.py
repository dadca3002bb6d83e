"""Ends what a run leaves behind, however it ends: `python -m slime.processes.sweeper RUN DRIVER_PID OUTPUT_DIR`.

A process of its own, for a driver that is killed outright can clean up nothing. It looks at the run's processes
(`slime.processes.registry`) every few seconds, for one that is gone cannot be asked which shared memory it had. When
the driver has ended, or says on standard input that the run has, whatever is left of the run after a grace period is
killed, its shared memory is removed, and so is the folder of the Ray that the run had started, whose logs are kept
with the run's where it did not end well. An engine's memory that was never seen is known by its name.

What the driver may say, a line each: "ray FOLDER" (of its Ray), "well" (it ended well), "end" (it has ended, though
its process may go on). The sweeper ends nothing without the run's mark.

Where driver and sweeper are killed together, the next run of the same user on this host sweeps (`sweep_dead_runs`), by
the record that the sweeper keeps: a file that names what a run holds. Driver and sweeper keep it locked; the kernel
gives the lock back when the last of them has ended, so whoever can take the lock knows that the run is dead. (Process
numbers would not do: containers may share /tmp, and each has numbers of its own.) The sweeper removes the record of
the run that it has swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from slime.processes.directories import make_own_directory
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
_SUFFIX = ".jsonl"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Record:
    """What a record says.

    Attributes:
        run: mark of the run.
        output_dir: of the run.
        ray: folder of the Ray that it had started.
        memory: its shared memory, path -> inode: a file of the same name may be somebody else's later.
    """

    run: str
    output_dir: Path | None = None
    ray: Path | None = None
    memory: dict[Path, int] = field(default_factory=dict)

    def memory_left(self) -> list[Path]:
        """Return what is left of its shared memory."""
        return [path for path, inode in self.memory.items() if _inode(path) == inode]


def directory() -> Path:
    """Return the directory of this user's records since this kernel has started, which nobody else can write to.

    A lock says nothing about a process under another kernel, which may see the same files: another host, a sandbox.

    Raises:
        OSError: there is no such directory, and it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"slime-runs-{os.getuid()}-{_BOOT.read_text()[:8]}"
    make_own_directory(path)
    return path


def begin_record(run: str, output_dir: Path) -> IO[str] | None:
    """Write the record of a run that begins; the run lives for as long as a process has the file open.

    Returns:
        the locked file; None where none can be made (no room, no locks), which costs only what it is for.
    """
    try:
        folder = directory()
        file = (folder / f".{run}").open("x")  # another run must not find it before it is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / f".{run}", path_of(run))
        note(run, "output_dir", output_dir)
    except OSError as error:
        logger.debug("there is no record of this run: %s", error)
        return None
    return file


def path_of(run: str) -> Path:
    """Return where the record of a run is."""
    return directory() / f"{run}{_SUFFIX}"


def note(run: str, kind: str, path: Path) -> None:
    """Add something to the record of a run, if it has one."""
    with contextlib.suppress(OSError), path_of(run).open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write(json.dumps([kind, str(path), _inode(path)]) + "\n")


def _inode(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return None


def remove_record(run: str) -> None:
    """Forget a run of which nothing is left."""
    with contextlib.suppress(OSError):
        path_of(run).unlink()


def dead_runs() -> Iterator[Record]:
    """Yield the records of runs of which neither driver nor sweeper lives, and remove each after it was handled."""
    try:
        paths = sorted(directory().glob(f"*{_SUFFIX}"))
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open(errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield _read(path.name.removesuffix(_SUFFIX), file)
            path.unlink()


def live_output_dirs() -> list[Path]:
    """Return the output directories of this user's runs on this host of which driver or sweeper lives."""
    found = []
    with contextlib.suppress(OSError):
        for path in directory().glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError), path.open(errors="replace") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(_read(path.name.removesuffix(_SUFFIX), file).output_dir)
    return [path for path in found if path is not None]


def _read(run: str, file: IO[str]) -> Record:
    record = Record(run)
    for line in file:
        with contextlib.suppress(ValueError, TypeError):  # half a line: its writer was killed
            kind, path, inode = json.loads(line)
            if kind == "memory":
                record.memory[Path(path)] = int(inode)
            elif kind in ("output_dir", "ray"):
                setattr(record, kind, Path(path))
    return record


POLL_S = 0.5
LOOK_S = 5.0
GRACE_S = 4.0
KILL_S = 3.0


class Sweeper:
    """The driver's side.

    Args:
        run: mark of the run.
        output_dir: of the run; where the logs of its Ray go if it fails.
    """

    def __init__(self, run: str, output_dir: Path) -> None:
        command = [sys.executable, "-m", __name__, run, str(os.getpid()), str(output_dir)]
        root = str(Path(__file__).resolve().parent.parent.parent)
        self._record = begin_record(run, output_dir)  # open, and with it locked, for as long as this process lives
        # A session of its own: Ctrl-C at the terminal must not end it. Nobody waits for it: it outlives the driver.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,
            pass_fds=[self._record.fileno()] if self._record is not None else [],
        )

    def say(self, line: str) -> None:
        """Tell it something; nothing happens when it is gone."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


class _Told:
    """What the driver has said so far."""

    def __init__(self) -> None:
        self.ray: Path | None = None
        self.well = False
        self.over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "ray":
                self.ray = Path(rest)
            elif word == "well":
                self.well = True
            elif word == "end":
                self.over.set()


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


def main(run: str, driver_pid: int, output_dir: Path) -> None:
    """Wait for the end of the run, then sweep."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)
    begin = psutil.Process().create_time()
    told, seen = _Told(), _Seen(run, {driver_pid, os.getpid()}, begin)
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended before this had begun
        _wait_for_end(run, psutil.Process(driver_pid), told, seen)
    _end(seen)
    remove_unused(seen.memory | left_by_engines(since=begin))
    if told.ray is not None:
        _remove_ray(told.ray, None if told.well else output_dir / "logs" / "ray")
    remove_record(run)


def _wait_for_end(run: str, driver: psutil.Process, told: _Told, seen: _Seen) -> None:
    next_look, noted = time.monotonic(), set[Path]()
    while is_alive(driver) and not told.over.wait(POLL_S):
        if told.ray is not None and told.ray not in noted:
            noted.add(told.ray)
            note(run, "ray", told.ray)
        if time.monotonic() >= next_look:
            seen.look()
            for path in seen.memory - noted:
                note(run, "memory", path)
            noted |= seen.memory
            next_look = time.monotonic() + LOOK_S


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
    said = []
    for record in dead_runs():
        here = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
        processes = _kill(_Seen(record.run, here, begin=time.time()))
        memory = remove_unused(record.memory_left())
        ray = record.ray if record.ray is not None and record.ray.is_dir() else None
        if ray is not None:
            _remove_ray(ray, None if record.output_dir is None else record.output_dir / "logs" / "ray")
        if processes or memory or ray:
            said.append(
                f"a run that was killed with its sweeper ({record.output_dir}) had left {processes} processes, "
                f"{len(memory)} files in {SHARED_MEMORY} and {ray or 'no folder'} of Ray: they are removed"
            )
    return said


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
