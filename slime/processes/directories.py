"""Directories of runs and of this user alone.

What a run has left in a directory, how it is moved out of the way of the next one, and who writes there now: a
directory holds a run if it has metrics or iterations. The `release` of a converter is a model, not a run, and a run
that ended before its first record has left nothing that another one could be mixed with.

Files and directories of this user alone hold secrets, and what a process loads or connects to again. Modes are given
when a file is made, not afterwards: in between another user could open it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

_INSTALLED = Path(__file__).resolve().parents[1] / "programs"
ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2]
"""What holds train.py and tools/: a folder of an installed slime (setup.py copies them there), else the checkout."""

METRICS_FILE, EVENTS_FILE = "metrics.jsonl", "run_events.jsonl"
JOB_FILE = "slurm_job.json"
_TAIL_BYTES = 1 << 18  # The end of metrics.jsonl in which the last rollout is looked for: a record has some kilobytes.


@dataclass(frozen=True)
class EarlierRun:
    """The run that a directory holds.

    Attributes:
        first: the first record of its metrics; empty without any.
        last: the newest record of a rollout, or of another kind where it has none.
        iterations: of its checkpoints, in order.
    """

    first: dict[str, Any]
    last: dict[str, Any]
    iterations: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        if self.first:
            parts.append(f"begun{_moment(self.first)}")
            rollout = self.last.get("rollout/step")
            is_known = isinstance(rollout, int | float) and math.isfinite(rollout)
            what = "last record" if not is_known else f"last rollout {rollout:.0f}"
            parts.append(f"{what}{_moment(self.last)}")
        if self.iterations:
            first, last = self.iterations[0], self.iterations[-1]
            parts.append(f"checkpoints {first} to {last}" if last > first else f"checkpoint {last}")
        return ", ".join(parts)


def earlier_run(directory: str | Path) -> EarlierRun | None:
    """Return the run that a directory holds, or None."""
    root = Path(directory)
    if not os.path.isdir(root):  # Path.is_dir raises where the name is too long
        return None
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*"))
    iterations = tuple(sorted(int(name[1]) for name in names if name))
    first, last = _ends_of(root / METRICS_FILE)
    return EarlierRun(first, last, iterations) if first or iterations else None


def place_aside(directory: Path) -> Path:
    """Return where a directory would be moved to: the first of `<directory>.1`, `.2`, ... that does not exist."""
    number = 1
    while os.path.lexists(place := directory.with_name(f"{directory.name}.{number}")):
        number += 1
    return place


def claim(directory: str | Path) -> int | None:
    """Keep other runs of this host out of a directory until the returned descriptor is closed.

    Returns:
        None where the directory cannot be locked, which costs only the protection.

    Raises:
        BlockingIOError: another run has claimed it.
    """
    # The lock is of the directory itself: it leaves no file behind, and a lock server of a network is never asked.
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError):  # a null byte: it is no path at all
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def is_claimed(directory: str | Path) -> bool:
    """Whether a run of this host writes to a directory now."""
    try:
        descriptor = claim(directory)
    except BlockingIOError:
        return True
    if descriptor is not None:
        os.close(descriptor)
    return False


def sign(directory: str | Path, environment: Mapping[str, str] = os.environ) -> None:
    """Write down which Slurm job writes to a directory, so that `began_before_requeue` knows it again."""
    if "SLURM_JOB_ID" in environment:
        (Path(directory) / JOB_FILE).write_text(json.dumps(_slurm_job(environment)) + "\n")


def began_before_requeue(directory: str | Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the last run in a directory is of this very Slurm job, before Slurm requeued the job."""
    if "SLURM_JOB_ID" not in environment:
        return False
    try:
        job, restarts = json.loads((Path(directory) / JOB_FILE).read_text())
        now, restarts_now = _slurm_job(environment)
        return bool(job == now and restarts < restarts_now)
    except (OSError, ValueError, TypeError):  # it is not there, or holds something else
        return False


def _slurm_job(environment: Mapping[str, str]) -> tuple[str, int]:
    """(the job's number, how often Slurm has requeued it)."""
    return environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT") or 0)


def _ends_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first record of a metrics.jsonl and the newest, of a rollout if possible; empty where there is none."""
    try:
        with path.open("rb") as file:
            first = _record(next(file, b""))
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            records = [record for line in file if (record := _record(line))]
    except OSError:
        return {}, {}
    newest = records[-1] if records else first
    return first or newest, next((record for record in reversed(records) if "rollout/step" in record), newest)


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # half a line: its writer was killed
        return {}
    return record if isinstance(record, dict) else {}


def whole_lines(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield (place behind it, value) of each whole line of a JSONL file that others write to.

    The value is None where it is no JSON: its writer was killed. A file that is not there has no lines.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            if not line.strip():
                continue
            try:
                yield start, json.loads(line)
            except ValueError:
                yield start, None


def _moment(record: dict[str, Any]) -> str:
    """When a record was written, to be put behind a word; nothing where it says nothing, or nonsense."""
    try:
        return time.strftime(" at %Y-%m-%d %H:%M", time.localtime(record["time"]))
    except (LookupError, TypeError, ValueError, OverflowError, OSError):
        return ""


# Modes of `open_new`: of files that others must not read, and that they must not write.
PRIVATE, READABLE = 0o600, 0o644


def make_own_directory(path: Path, *, forbidden: int = 0o077) -> None:
    """Make a directory that only this user can enter, or see that one which is there is as private as it has to be.

    Args:
        path: its parents must exist.
        forbidden: permissions that nobody else may have where it exists.

    Raises:
        PermissionError: somebody else owns it, others have more rights, or it is a link.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} is not a directory")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & forbidden:
        raise PermissionError(f"other users have access to {path} (mode {stat.S_IMODE(status.st_mode):04o})")


def open_new(path: Path, *, mode: int = PRIVATE) -> IO[bytes]:
    """Open a new file for writing, with this mode whatever the umask allows; an older one of the name is removed."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return path.open("wb")


def write_private(path: Path, text: str) -> None:
    """Write a text that only this user can read."""
    with open_new(path) as file:
        file.write(text.encode())


def use_private_temp_dir() -> None:
    """Have this process, and what it starts from now on, put temporary files where only this user gets to them.

    torch compiles kernels into a fixed name of the temporary directory and loads them from there, and SGLang's
    processes listen at sockets in it and unpickle what arrives. In a directory that users share, whoever makes that
    name first, or whom the umask lets write, would run code as this user. The directory stays: compiled kernels are of
    use to the next run.
    """
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        make_own_directory(parent)  # TMPDIR is private already
        return
    path = parent / f"slime-tmp-{os.getuid()}"
    try:
        make_own_directory(path)
    except PermissionError as error:
        path = Path(tempfile.mkdtemp(prefix="slime-tmp-"))
        logger.warning("%s: temporary files are in %s, and compiled kernels are not kept", error, path)
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None  # it is looked up again
