"""What the processes of a run are doing at this moment, as text: state, memory, and the stack of every thread. And how
much memory this host gives processes, and whether its kernel has ended one for taking too much.

Stacks come from py-spy where it is installed and may look at other processes. Without it a process writes its own, if
it was prepared for that by `write_stacks_on_signal`: SIGUSR2 has faulthandler write into memory which only its owner
can read. Others are described by what the kernel knows.

Both versions of control groups are read for memory; where neither says anything, the kernel's own counter does.

Counts of what this process has done, and of work that is under way, are for whoever watches or shows them: code that
works calls `went_on` and counts with `progress_bar`; every Ray actor publishes both (`slime.ray.utils`). The report
on a stall is written here (`write_report`); `slime.ray.supervisor` asks for its parts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from slime.processes.registry import SHARED_MEMORY, processes_of
from slime.processes.wait import settle

_counts: Counter[str] = Counter()


def went_on(what: str, amount: int = 1) -> None:
    """Count something that was done ("samples"). Cheap; two threads may lose a count to each other, never all."""
    _counts[what] += amount


def counts() -> dict[str, int]:
    """Everything that was counted in this process."""
    return dict(_counts)


Count = tuple[str, int, int]  # (what is done, how much of it is done, how much there is).


class ProgressBar(contextlib.AbstractContextManager["ProgressBar"]):
    """A count of `total` units of work; it is under way from its making until `close`, or as long as its block.

    Args:
        total: units of work.
        what: is done.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        _under_way.append(self)

    def update(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        self.done += n

    def close(self) -> None:
        """The work is over."""
        if self in _under_way:
            _under_way.remove(self)

    def __exit__(self, *_: object) -> None:
        self.close()


progress_bar = ProgressBar
_under_way: list[ProgressBar] = []


def counts_under_way() -> list[Count]:
    """The counts of this process, in the order in which they were begun."""
    return [(bar.what, bar.done, bar.total) for bar in list(_under_way)]


PY_SPY_S = 20.0
ASK_S = 2.0
MAX_CHARS = 20_000
_MEMORY = "slime-stacks"


def write_stacks_on_signal() -> None:
    """Have this process write its stacks when another one asks for them."""
    if threads_file.fd is None:
        threads_file.fd = os.memfd_create(_MEMORY)
        faulthandler.register(signal.SIGUSR2, file=threads_file.fd, all_threads=True)


class threads_file:  # noqa: N801 - a namespace for one descriptor, which must stay open as long as the process lives
    """Where this process writes its stacks."""

    fd: int | None = None


def describe(pids: Sequence[int]) -> str:
    """A paragraph for each process."""
    with ThreadPoolExecutor(4, thread_name_prefix="stacks") as threads:
        return "\n".join(threads.map(_one, pids))


def _one(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info().rss / 2**30
            head = (
                f"--- process {pid}: {_title(process)}\n"
                f"state {process.status()}, {process.num_threads()} threads, {memory:.2f} GiB, CPU time "
                f"{times.user + times.system:.1f} s, waits in the kernel at {_kernel_wait(pid)}"
            )
    except psutil.Error as error:
        return f"--- process {pid}: {type(error).__name__}\n"
    return f"{head}\n{_stack(pid)[:MAX_CHARS]}\n"


def _title(process: psutil.Process) -> str:
    """What a process is, without its arguments: they may hold secrets."""
    words = process.cmdline() or [process.name()]
    if len(words) == 1 or not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name[:80] if words[0].startswith("/") else words[0][:80]
    if "-m" in words[1:3]:
        return f"python -m {words[words.index('-m') + 1]}"
    scripts = [word for word in words[1:] if not word.startswith("-")]
    return f"python {Path(scripts[0]).name[:80]}" if scripts and "-c" not in words else "python"


def _kernel_wait(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text() or "?"
    return "?"


def _stack(pid: int) -> str:
    if pid == os.getpid():
        return _own()
    if not _is_python(pid):
        return "(no Python)"
    problem = "py-spy is not installed"
    if py_spy := _py_spy():
        # Without stopping it: a process that is stopped for a look may miss a deadline.
        command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
        except subprocess.TimeoutExpired:
            problem = f"py-spy did not end within {PY_SPY_S:g} s"
        else:
            if done.returncode == 0:  # its first lines repeat the command line
                return done.stdout[max(0, done.stdout.find("\nThread ")) :].strip()
            problem = (done.stderr.strip().splitlines() or ["py-spy failed"])[-1]
    return _asked(pid) or f"(no stack: {problem})"


def _own() -> str:
    """This process's stacks, the main thread's first: what is too long is cut at the end.

    faulthandler reads frames while other threads change them, and can end the process.
    """
    names, main = {thread.ident: thread.name for thread in threading.enumerate()}, threading.main_thread().ident
    return "\n".join(
        f"Thread {ident} ({names.get(ident, '?')}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sorted(sys._current_frames().items(), key=lambda found: found[0] != main)
    )


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in Path(os.readlink(f"/proc/{pid}/exe")).name
    return False


def _asked(pid: int) -> str | None:
    """The stacks that a process writes itself; None where it does not."""
    file = _memory_of(pid)
    if file is None or not _catches(pid, signal.SIGUSR2):
        return None
    try:
        begin = os.stat(file).st_size
        os.kill(pid, signal.SIGUSR2)
        end = time.monotonic() + ASK_S
        while time.monotonic() < end:
            time.sleep(0.05)
            if os.stat(file).st_size > begin:
                time.sleep(0.1)
                return Path(file).read_bytes()[begin:].decode(errors="replace").strip()
    except OSError:
        return None
    return None


def _memory_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{_MEMORY}"):
                    return path
    return None


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; the signal would end one that has none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def write_report(path: Path, title: str, sections: Mapping[str, Callable[[], str]]) -> None:
    """Write sections one after the other, each as soon as it is there; one that fails says how.

    Args:
        path: of the file, to whose end is written: a run may stall twice.
        title: the first line.
        sections: heading -> what makes its text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {title}\n")
        for heading, make in sections.items():
            settle(made := Future[str](), make)  # one part that cannot be asked must not hide others
            error = made.exception(0)
            text = made.result(0) if error is None else f"(not there: {type(error).__name__}: {error})"
            file.write(f"\n== {heading}\n{text.rstrip()}\n")
            file.flush()
        file.write("\n")


def progress_lines(board: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each process: what it has done, and when it last said so.

    Args:
        board: process -> what it published.
    """
    lines = []
    for name, said in board.items():
        done = ", ".join(f"{count} {what}" for what, count in sorted(said.get("counts", {}).items()))
        silent_s = time.time() - float(said.get("time", 0))
        lines.append(f"{name} (process {said.get('pid')}): {done or 'nothing yet'}; last heard {silent_s:.0f} s ago")
    return "\n".join(lines) or "no process has said anything"


def collective_lines(board: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each trainer rank: the collective it is in or was seen in last, and what its groups began."""
    lines = []
    for name, said in board.items():
        if "begun" not in said:
            continue
        last = said.get("last")
        where = "none was seen"
        if last:
            where = f"{'in' if last['in_it'] else 'last seen in'} {last['call']} since {last['since']}"
        begun = ", ".join(f"{group} {count}" for group, count in said["begun"].items() if count)
        lines.append(f"{name}: {where}; operations begun by each group: {begun or 'not known'}")
    return "\n".join(lines) or "no trainer rank is in a process group"


def engine_lines(state: Mapping[str, Any]) -> str:
    """Return a line for each router and engine."""
    shown = {name: said if isinstance(said, str) else json.dumps(said, default=str) for name, said in state.items()}
    return "\n".join(f"{name}: {text}" for name, text in shown.items()) or "the run has no engines"


def describe_run(run: str, directory: str, more: Sequence[int] = ()) -> str:
    """Return the memory of this node, and what every process of the run on it is doing.

    Args:
        run: mark of the run.
        directory: whose disk is looked at.
        more: process ids that do not bear the mark.
    """
    pids = sorted({process.pid for process in processes_of(run)} - {os.getpid()} | set(more))
    return f"{free_memory(Path(directory))}\n\n{describe(pids)}"


def free_memory(directory: Path) -> str:
    """Lines on the memory of this node: host, GPUs, shared memory, and the disk of a directory."""
    memory = psutil.virtual_memory()
    lines = [f"host: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free"]
    for place in (SHARED_MEMORY, directory):
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(place)
            lines.append(f"{place}: {disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB are free")
    return "\n".join([*lines, *_gpus()])


def _gpus() -> list[str]:
    if (program := shutil.which("nvidia-smi")) is None:
        return ["GPUs: none"]
    query = ["--query-gpu=index,memory.free,memory.total,utilization.gpu", "--format=csv,noheader"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"GPUs: nvidia-smi failed: {error}"]
    return [f"GPU {line} (number, free, in all, busy)" for line in done.stdout.strip().splitlines()]


_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_EVENTS = ("memory.events", "memory/memory.oom_control")
_KERNEL = Path("/proc/vmstat")
# What programs write whose address space is too small; in lower case or not.
OUT_OF_ADDRESSES = (
    "MemoryError",
    "Cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "Resource temporarily unavailable",
)


def host_memory() -> int:
    """Return the bytes of memory that this machine has, or the container that this process is in may take."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        with contextlib.suppress(OSError):
            if (text := (_CGROUP / name).read_text().strip()).isdigit():
                sizes.append(int(text))
    return min(sizes)


def memory_kills() -> dict[str, int]:
    """Return how many processes of this container or host the kernel has killed for memory so far, by the file that
    says so."""
    found = {}
    for path in (*(_CGROUP / name for name in _EVENTS), _KERNEL):
        with contextlib.suppress(OSError):
            for name, _, value in (line.partition(" ") for line in path.read_text().splitlines()):
                if name == "oom_kill":
                    found[str(path)] = int(value)
    return found


def address_limit() -> int | None:
    """Return the bytes that each process may map (`ulimit -v`); None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def killed_for_memory(before: Mapping[str, int]) -> str | None:
    """Return in a sentence with a remedy that a process was killed for memory since `memory_kills` was `before`."""
    count = max((kills - before.get(name, 0) for name, kills in memory_kills().items()), default=0)
    if not count:
        return None
    return (
        f"out of host memory: the kernel's out-of-memory killer has ended {count} process(es) here, which has "
        f"{host_memory() / 1e9:.1f} GB; ask for less (--dry-run shows what a run takes), or give the container more"
    )


def too_few_addresses(text: str) -> str | None:
    """Return in a sentence with a remedy that a process ended for `ulimit -v`, going by what it wrote; else None."""
    limit = address_limit()
    if limit is None or not any(sign.lower() in text.lower() for sign in OUT_OF_ADDRESSES):
        return None
    return f"`ulimit -v` lets a process map {limit / 1e9:.1f} GB only; lift it: ulimit -v unlimited"
