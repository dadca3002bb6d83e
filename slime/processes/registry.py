"""Processes of a run: started here, owned by this process, ended with it, and found again by the run's mark.

`registry()` belongs to the calling process. What it starts ends when it is told to, at exit, on SIGTERM or SIGINT,
and, because the kernel is asked to (PR_SET_PDEATHSIG), even when this process is killed outright. Only what was
started here is ever ended, by its process id; multiprocessing and Ray processes are not its business.

`begin_run` puts the mark into this process's environment, from where everything that it starts inherits it: Ray,
actors, engines, their children. `processes_of` finds them on this node; a process that has written over its
environment (to change its title) is found as the child of one that has not. What they leave is swept by
slime.processes.sweeper.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from slime.processes.wait import settle

logger = logging.getLogger(__name__)

# Runs as `python -c`, asks the kernel for SIGKILL when its parent ends, and becomes the command. Popen's preexec_fn
# would do it in a fork of a process with many threads (Ray's, gRPC's), which can deadlock.
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ProcessRegistry:
    """Starts child processes and ends them with everything they started."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
        self._spawner = _Spawner()
        self._begin = psutil.Process().create_time()

    def start(
        self,
        cmd: list[str],
        *,
        name: str,
        log_path: str | Path | None,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        pass_fds: tuple[int, ...] = (),
        pipes: tuple[int, int] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, its output going to the end of `log_path`.

        Args:
            cmd: program and arguments.
            name: for messages.
            log_path: file for stdout and stderr; its directory is made. None: they go where this process's go.
            env: the whole environment of the child; None passes on this process's.
            cwd: its working directory; None is this process's.
            pass_fds: open files of this process that the child gets.
            pipes: open files of this process that are its stdin and stdout; stderr alone goes to `log_path`.
        """
        if log_path is not None:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        wrapped = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *cmd]
        with Path(log_path).open("ab") if log_path is not None else contextlib.nullcontext() as log:

            def spawn() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    wrapped,
                    stdin=subprocess.DEVNULL if pipes is None else pipes[0],
                    stdout=log if pipes is None else pipes[1],
                    stderr=log,
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )

            process = self._spawner.call(spawn)
        with self._lock:
            self._running[process.pid] = (process, name)
        logger.info("started %s (process %d), log in %s", name, process.pid, log_path or "this one's output")
        return process

    def end(self, process: subprocess.Popen[bytes], *, grace_s: float = 5.0) -> None:
        """End a started process and all its descendants: SIGTERM, then SIGKILL for what is left after `grace_s`."""
        self._end([process], grace_s)

    def end_all(self, *, grace_s: float = 5.0) -> None:
        """End everything that was started here and still runs."""
        with self._lock:
            self._end([process for process, _ in self._running.values()], grace_s)

    def running(self) -> list[str]:
        """Names of the started processes that still run."""
        with self._lock:
            return [name for process, name in self._running.values() if process.poll() is None]

    def _end(self, processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
        members = {member.pid: member for process in processes for member in _tree(process.pid)}
        memory = shared_memory_of(members, since=self._begin)  # what is killed cannot remove it
        for member in members.values():
            _send(member, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while any(is_alive(member) for member in members.values()) and time.monotonic() < end:
            time.sleep(0.02)
        for process in processes:  # what was started meanwhile is in the session that the process leads
            members |= {member.pid: member for member in _tree(process.pid)}
        for member in members.values():
            if is_alive(member):
                _send(member, signal.SIGKILL)
        # Until all are gone: memory of a GPU is free, and a port, once the process that held it has ended.
        end = time.monotonic() + 5.0
        while any(is_alive(member) for member in members.values()) and time.monotonic() < end:
            time.sleep(0.02)
        if left := [pid for pid, member in members.items() if is_alive(member)]:
            logger.warning("processes %s are still there 5 s after SIGKILL, with the memory that they hold", left)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.0))
            with self._lock:
                self._running.pop(process.pid, None)
        remove_unused(memory)


async def start_with_streams(
    cmd: list[str], *, name: str, log_path: Path | None, env: dict[str, str], cwd: str | None, limit: int
) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a command in this process's registry that the running loop talks to over its stdin and stdout.

    Args:
        cmd, name, log_path, cwd: as for `ProcessRegistry.start`.
        env: the whole environment of the child, but for this run's mark.
        limit: most bytes that are read ahead.

    Returns:
        (process, what it writes, what it reads).
    """
    loop, marked = asyncio.get_running_loop(), {MARK: os.environ[MARK]} if MARK in os.environ else {}
    (their_in, to_child), (from_child, their_out) = os.pipe(), os.pipe()
    reads, writes = os.fdopen(from_child, "rb", 0), os.fdopen(to_child, "wb", 0)
    try:
        ends = (their_in, their_out)
        process = registry().start(cmd, name=name, log_path=log_path, env={**env, **marked}, cwd=cwd, pipes=ends)
    except BaseException:
        reads.close()
        writes.close()
        raise
    finally:
        os.close(their_in)
        os.close(their_out)
    reader = asyncio.StreamReader(limit)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), reads)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), writes
    )
    return process, reader, asyncio.StreamWriter(transport, protocol, None, loop)


class _Spawner:
    """One thread that starts every child: the kernel's parent-death signal fires when the *thread* that forked ends.

    A daemon thread, so it lives until the process is gone.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, job: Callable[[], Any]) -> Any:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="process-spawner", daemon=True)
                self._thread.start()
        result: Future[Any] = Future()
        self._jobs.put((job, result))
        return result.result()

    def _run(self) -> None:
        while True:
            job, result = self._jobs.get()
            settle(result, job)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, and what was orphaned in the session it leads."""
    members: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        members = {member.pid: member for member in [root, *root.children(recursive=True)]}
    for other in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if other.pid not in members and os.getsid(other.pid) == pid:
                members[other.pid] = other
    return list(members.values())


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie whose other threads still run holds its memory and files until then."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


class _Owner:
    """Holds the registry of this process; a forked child gets one of its own."""

    registry: ProcessRegistry | None = None
    pid = 0


def registry() -> ProcessRegistry:
    """The registry of this process; the first call installs the clean-up at exit, on SIGTERM and on SIGINT."""
    if _Owner.registry is None or _Owner.pid != os.getpid():
        _Owner.registry, _Owner.pid = ProcessRegistry(), os.getpid()
        atexit.register(_end_all_of, os.getpid())
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                _end_all_on(number)
    return _Owner.registry


def _end_all_of(pid: int) -> None:
    if _Owner.registry is not None and _Owner.pid == pid == os.getpid():
        _Owner.registry.end_all()


def _end_all_on(number: signal.Signals) -> None:
    """Put the clean-up before whatever this process did on the signal so far."""
    previous = signal.getsignal(number)
    if previous in (None, signal.SIG_IGN):  # native code's handler cannot be chained; an ignored signal stays ignored
        return

    def handle(received: int, frame: FrameType | None) -> None:
        _end_all_of(os.getpid())
        if callable(previous):
            previous(received, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(received, signal.SIG_DFL)
            os.kill(os.getpid(), received)

    signal.signal(number, handle)


def exit_text(code: int) -> str:
    """How a process ended, from Popen's return code."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def log_tail(path: str | Path, lines: int = 40) -> str:
    """The last lines of a log file, for an error message; a sentence when it is missing or empty."""
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return f"({path} does not exist)"
    kept = text.splitlines()[-lines:]
    return "\n".join(kept) if kept else f"({path} is empty)"


def newest_line(logs: Iterable[Path], *, since: float) -> str:
    """Return the last line with words of the log that was written last, after its name.

    Args:
        logs: files that are there.
        since: a time as `time.time` tells it; without a log that was written later "" is returned.
    """
    written = {path.stat().st_mtime: path for path in logs}
    if not written or (last := max(written)) < since:
        return ""
    newest = written[last]
    lines = [re.sub(r"\x1b\[\w*", "", line).strip() for line in log_tail(newest, 3).splitlines()]
    return f"{newest.name}: {next((line[:160] for line in reversed(lines) if line), '')}"


MARK = "SLIME_RUN_ID"
# What is removed from it are files that processes of the run had open, and what `left_by_engines` finds.
SHARED_MEMORY = Path("/dev/shm")  # nosec B108
_OF_SGLANG = "sglang_loads_*.shm"
_OF_TORCH = re.compile(r"torch_(\d+)_")


def begin_run() -> str:
    """Give this process, and what it starts from now on, the mark of a new run; returns the mark."""
    os.environ[MARK] = secrets.token_hex(8)
    return os.environ[MARK]


def processes_of(run: str) -> list[psutil.Process]:
    """The marked processes of a run and all that they started; this one only where it was started with the mark."""
    alive = {process.pid: process for process in psutil.process_iter(["ppid"])}
    children: dict[int, list[int]] = {}
    for process in alive.values():
        children.setdefault(process.info["ppid"], []).append(process.pid)
    waiting, found = [pid for pid in alive if _is_marked(pid, run)], set[int]()
    while waiting:
        if (pid := waiting.pop()) not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return [alive[pid] for pid in sorted(found)]


def _is_marked(pid: int, run: str) -> bool:
    try:
        return f"{MARK}={run}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def shared_memory_of(pids: Iterable[int], since: float) -> set[Path]:
    """Return the shared memory that these processes have open or mapped, and what torch named after them.

    People keep models and data in /dev/shm, too, which a run reads: its own memory has no directory, and is not older
    than the run.

    Args:
        pids: of the processes.
        since: when the run began, in seconds since the epoch.
    """
    wanted = set(pids)
    found = {path for pid in wanted for path in _open_files(pid) if path.parent == SHARED_MEMORY}
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            named = _OF_TORCH.match(path.name)
            if named and int(named[1]) in wanted:
                found.add(path)
    return {path for path in found if _changed_at(path) >= since}


def _changed_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_ctime
    return 0.0


def left_by_engines(since: float) -> set[Path]:
    """This user's files of SGLang's schedulers (their load; each has its own open for as long as it lives) that were
    written at `since` or later, seconds since the epoch. A scheduler that was killed before anybody had looked at it
    leaves one that nothing leads to."""
    found = set[Path]()
    for path in SHARED_MEMORY.glob(_OF_SGLANG):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                found.add(path)
    return found


def _open_files(pid: int) -> set[Path]:
    prefix, found = f"{SHARED_MEMORY}/", set[str]()
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        found |= {line[line.index(prefix) :] for line in maps.splitlines() if prefix in line}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {Path(name) for name in found if name.startswith(prefix) and not name.endswith(" (deleted)")}


def remove_unused(files: Collection[Path]) -> list[Path]:
    """Remove those of the files in /dev/shm that no process has open or mapped any more; returns them."""
    left = [path for path in files if path.parent == SHARED_MEMORY and path.exists()]
    if not left:
        return []
    used = {path for process in psutil.process_iter() for path in _open_files(process.pid)}
    removed = []
    for path in left:
        if path not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed
