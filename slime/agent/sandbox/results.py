"""Pieces that sandboxes of every backend share: errors, output of bounded size, and environments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

OUTPUT_BYTES = 1 << 20
OPEN_S = 300.0  # the longest that a backend takes to make a sandbox
FILE_BYTES = 256 << 20
SERVER_KEY_ENV = "SLIME_SANDBOX_KEY"
TMP = "/tmp"  # nosec B108: of a sandbox, which has its own
USERS = ("root", "agent")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A process that has ended but was not waited for cannot be killed: it counts no more, and the loop ends at 10 s.
END_AGENT = (
    "for _ in $(seq 200); do pkill -KILL -u agent || exit 0;"
    " ps -u agent -o stat= | grep -qv '^ *Z' || exit 0; sleep 0.05; done; exit 1"
)
T = TypeVar("T")
ExecResult = tuple[int, str, str]


class SandboxError(RuntimeError):
    """The sandbox could not be made, has ended, or could not do what it was asked for."""


class SandboxTimeout(SandboxError, TimeoutError):
    """A command took longer than its timeout and was killed."""


class Output:
    """Output of a command: its beginning and its end, never more than `limit` bytes."""

    def __init__(self, limit: int = OUTPUT_BYTES) -> None:
        self.half, self.seen = limit // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.seen += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[max(room, 0) :]
        del self.tail[: -self.half]

    def text(self) -> str:
        """The text, with a line that tells how much was cut out of its middle."""
        cut = self.seen - len(self.head) - len(self.tail)
        note = f"\n... {cut} bytes cut ...\n".encode() if cut else b""
        return (bytes(self.head) + note + bytes(self.tail)).decode(errors="replace")


class PipeReader:
    """Reads a pipe as data comes, so that whoever writes never waits, and keeps a bounded part of it."""

    def __init__(self, limit: int | None = None) -> None:
        self.output = Output(limit) if limit else Output()
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def take_end(self) -> int:
        """The end to write to; the caller closes it."""
        end, self._write_end = self._write_end, -1
        return end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._write_end >= 0:
            os.close(self._write_end)

    def _read(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._read_end, 1 << 16)
            self.output.add(data)
            if not data:
                asyncio.get_running_loop().remove_reader(self._read_end)
            return bool(data)
        return False

    def drain(self) -> None:
        """Take what has been written so far: a pipe's content, not what a process goes on writing."""
        for _ in range(64):
            if not self._read():
                return

    def text(self) -> str:
        """What came so far."""
        self.drain()
        return self.output.text()


def checked(result: ExecResult, cmd: str, *, check: bool) -> ExecResult:
    """Return the result.

    Raises:
        SandboxError: `check` is set and the command failed.
    """
    code, stdout, stderr = result
    if check and code:
        raise SandboxError(f"exit code {code} of {cmd[:200]!r} in the sandbox: {(stderr or stdout)[-1000:]}")
    return result


def user_environment(user: str, env: Mapping[str, str] | None, workdir: str) -> dict[str, str]:
    """The whole environment of a command: nothing of this process's own goes in.

    Raises:
        ValueError: there is no such user.
    """
    if user not in USERS:
        raise ValueError(f"a sandbox has the users {' and '.join(USERS)}, not {user!r}")
    own = {
        "PATH": PATH,
        "HOME": f"/home/{user}",
        "USER": user,
        "PWD": workdir,
        "LANG": "C.UTF-8",
        "TMPDIR": TMP,
        # /etc is read-only: `git config --system` writes here.
        "GIT_CONFIG_SYSTEM": "/home/.gitconfig",
    }
    return {**own, **(env or {})}


def file_bytes(data: str | bytes | Path, most: int = FILE_BYTES) -> bytes:
    """Bytes of a text, of bytes, or of a file of the host.

    Raises:
        ValueError: they are more than `most`.
    """
    if isinstance(data, Path):
        size = data.stat().st_size
        content = data.read_bytes() if size <= most else b""
    else:
        content = data.encode() if isinstance(data, str) else data
        size = len(content)
    if size > most:
        raise ValueError(f"a file of {size} bytes is too large for the sandbox, which takes {most}")
    return content


def file_text(data: bytes, path: str) -> str:
    """The text of a file.

    Raises:
        SandboxError: it is not UTF-8; replaced characters would change a patch silently.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SandboxError(f"{path} in the sandbox is not UTF-8 text: {error}") from None


async def retried(call: Callable[[], Awaitable[T]], kinds: tuple[type[Exception], ...], *, tries: int) -> T:
    """Call until it succeeds, with growing random pauses (full jitter, 1 s doubling up to 32 s at the most).

    Args:
        kinds: errors after which it is called again.

    Raises:
        Exception: that of the last try, or the first one of another kind.
    """
    for number in range(tries - 1):
        with contextlib.suppress(*kinds):
            return await call()
        await asyncio.sleep(random.uniform(0, min(2.0**number, 32.0)))
    return await call()
