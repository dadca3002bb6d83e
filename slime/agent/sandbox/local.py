"""Sandboxes on this host: namespaces of a plain user, no root, no daemon, no network.

`slime.processes.isolation` makes the sandbox; this module starts it and talks to its first process. Whatever happens
to this process, the sandbox ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from slime.agent.sandbox.access import GatewayAccess, GatewayDoor
from slime.agent.sandbox.results import (
    TMP,
    ExecResult,
    PipeReader,
    SandboxError,
    SandboxTimeout,
    checked,
    file_bytes,
    file_text,
    user_environment,
)
from slime.processes.isolation.kernel import MESSAGE_BYTES
from slime.processes.wait import wait_async

logger = logging.getLogger(__name__)

WORKDIR = "/workspace"
_SHOWN = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/usr",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_COVERED = ("/home/agent", "/home/root", "/dev", "/proc")
_BASH = "/bin/bash"
_PACKAGE = str(Path(__file__).resolve().parents[2])
_LEAST_MB = 64
_END_S = 10.0
_START_S = 30.0
_KILLED = 137
_REMEDY = (
    "allow it (docs/sandbox.md, 'What the kernel must allow'), choose another backend, or pass unsafe=True"
    " (--sandbox-unsafe) to do without that protection"
)


class LocalSandbox:
    """A sandbox on this host.

    Example:
        async with LocalSandbox() as sandbox:
            code, stdout, stderr = await sandbox.exec("echo $((6 * 7))")

    Args:
        workdir: directory in which commands start; empty and writable.
        show: more paths of the host to show inside, read-only (`sys.prefix`, `/opt/node`).
        memory_mb: MiB that all processes may hold together.
        disk_mb: MiB that all files may hold together; they lie in memory.
        processes: how many there may be at a time.
        gateway: the one server that the sandbox reaches; None: no server.
        unsafe: do without the protections that this host's kernel refuses.
    """

    def __init__(
        self,
        *,
        workdir: str = WORKDIR,
        show: Sequence[str] = (),
        memory_mb: int = 1024,
        disk_mb: int = 512,
        processes: int = 128,
        gateway: GatewayAccess | None = None,
        unsafe: bool = False,
    ) -> None:
        for name, value, least in (
            ("memory_mb", memory_mb, _LEAST_MB),
            ("disk_mb", disk_mb, 1),
            ("processes", processes, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} of a local sandbox: at least {least}")
        _check_paths(workdir, show)
        self.workdir, self.show, self.gateway, self.unsafe = workdir, tuple(show), gateway, unsafe
        self.limits = {"memory_mb": memory_mb, "disk_mb": disk_mb, "files": disk_mb * 64, "processes": processes}
        self.refused: list[str] = []
        self.killed_for_memory = 0  # How often everything was killed for holding too much memory.
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self._door: GatewayDoor | None = None
        self._listeners: dict[int, int | None] = {}  # request -> its socket, None before the answer
        self._pending: dict[int, asyncio.Future[int]] = {}
        self._requests = 0
        self._ready: asyncio.Future[dict[str, Any]] | None = None

    @property
    def sandbox_id(self) -> str:
        """The process that holds it; empty before it is open."""
        return f"local-{self.process.pid}" if self.process else ""

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self._ready = asyncio.get_running_loop().create_future()
        async with contextlib.AsyncExitStack() as until_open:
            until_open.push_async_callback(self._end)
            with theirs:
                ours.send(json.dumps(self._settings()).encode())
                self.process = _start(theirs.fileno())
            ours.setblocking(False)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._hear)
            try:
                self._accept(await asyncio.wait_for(self._ready, _START_S))
            except TimeoutError:
                raise SandboxError(f"a local sandbox was not ready within {_START_S:g} s") from None
            if self.gateway:
                await self.connect(self.gateway)
            until_open.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def connect(self, gateway: GatewayAccess) -> None:
        """Let the sandbox reach the gateway, at `gateway.inside_url`; once in its life.

        Raises:
            SandboxError: it reaches one already, or a program inside has taken the port.
        """
        if self._door:
            raise SandboxError("the sandbox reaches a gateway already, under the key of another session")
        number, future = await self._ask(op="listen", port=gateway.port)
        self._listeners[number] = None
        try:
            await self._within(_START_S, number, future, what=lambda: "listen")
            if (listener := self._listeners[number]) is None:
                raise SandboxError("the sandbox sent no socket that listens")
            held = socket.socket(fileno=listener)
            self._listeners[number] = None
        finally:
            if (left := self._listeners.pop(number)) is not None:
                os.close(left)
        self._door = GatewayDoor(gateway, held)
        await self._door.open()

    def _settings(self) -> dict[str, Any]:
        # Parents first: what lies in a directory that is shown already is skipped.
        shown = sorted((path for path in (*_SHOWN, *self.show) if os.path.exists(path)), key=len)
        own = {"owner": os.getpid(), "shown": shown, "workdir": self.workdir}
        return own | self.limits

    def _accept(self, message: dict[str, Any]) -> None:
        if "fatal" in message:
            raise SandboxError(
                f"a local sandbox cannot be made on this host, its kernel refuses: {message['fatal']}. It needs user,"
                " mount and pid namespaces and mount_setattr (Linux 5.12); see docs/sandbox.md, or choose the docker,"
                " e2b or http backend"
            )
        self.refused = message["refused"]
        if self.refused and not self.unsafe:
            raise SandboxError(f"this host's kernel refuses a local sandbox {', '.join(self.refused)}: {_REMEDY}")
        if self.refused:
            logger.warning("unsafe sandbox: this host's kernel refuses it %s", ", ".join(self.refused))

    async def _end(self) -> None:
        """End the sandbox with all its processes, and wait until they are gone."""
        control, process = self.control, self.process
        self.control = None
        if self._door:
            await self._door.close()
            self._door = None
        if control:
            with contextlib.suppress(OSError):
                asyncio.get_running_loop().remove_reader(control.fileno())
                control.shutdown(socket.SHUT_RDWR)  # Seen inside even where a forked process holds a copy.
            control.close()
        self._fail("the sandbox has been closed")
        if process:
            end = time.monotonic() + _END_S
            while process.poll() is None:
                if time.monotonic() > end:
                    process.kill()
                await asyncio.sleep(0.001)

    def _fail(self, why: str) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxError(why))
        self._pending.clear()

    def _hear(self) -> None:
        """Take a message of the sandbox's first process."""
        assert self.control is not None and self._ready is not None
        try:
            data, files, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        for file in files:
            os.set_inheritable(file, False)
        try:
            if data:
                self._take(json.loads(data), files)
            else:
                self._lose("its first process is gone")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self._lose(f"its first process sent no message that could be read ({type(error).__name__})")
        finally:
            for file in files:  # those that nobody has asked for
                os.close(file)

    def _lose(self, why: str) -> None:
        """Give up a sandbox whose first process cannot be talked to any more."""
        assert self.control is not None and self._ready is not None
        asyncio.get_running_loop().remove_reader(self.control.fileno())
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        self.control = None
        self._fail(f"the sandbox has ended: {why}")
        if not self._ready.done():
            self._ready.set_result({"fatal": f"{why}, while it made the sandbox"})

    def _take(self, message: dict[str, Any], files: list[int]) -> None:
        """Do what a message asks for, and take the files that were waited for."""
        assert self._ready is not None
        if "ready" in message or "fatal" in message:
            if not self._ready.done():
                self._ready.set_result(message)
            return
        if "over_memory" in message:
            self.killed_for_memory += 1
            used, limit = int(message["over_memory"]), self.limits["memory_mb"]
            logger.info("%s: all processes killed, they held %d MiB, the limit is %d", self.sandbox_id, used, limit)
            return
        code = int(message["exit"]) if "error" not in message else 0
        if (future := self._pending.pop(message["id"], None)) is None or future.done():
            return
        if "error" in message:
            future.set_exception(SandboxError(f"the sandbox could not do it: {message['error']}"))
            return
        if files and message["id"] in self._listeners:
            self._listeners[message["id"]] = files.pop()
        future.set_result(code)

    async def _ask(self, files: Sequence[int] = (), **message: Any) -> tuple[int, asyncio.Future[int]]:
        """Send a request; the future gets the exit code."""
        if self.control is None:
            raise SandboxError("the sandbox is not open")
        self._requests += 1
        number = self._requests
        data = json.dumps({"id": number, **message}).encode()
        if len(data) > MESSAGE_BYTES // 2:
            raise ValueError(f"a command of {len(data)} bytes is too long; write a script with write_file and run it")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[number] = future

        async def send() -> bool:
            if self.control is None:
                raise BrokenPipeError("closed meanwhile")
            try:
                socket.send_fds(self.control, [data], files)
            except BlockingIOError:
                return False
            return True

        try:
            await wait_async("a sandbox to take a request", _START_S, send, interval_s=0.01)
        except BaseException as error:
            self._pending.pop(number, None)
            _leave(future)
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox has ended: {error}") from None
            raise
        return number, future

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a command line with bash in the work directory; what it leaves in the background runs on.

        Args:
            user: "root" or "agent": the name and the home directory; both have the rights of one plain user.
            env: added to PATH, HOME, LANG and the like; nothing of this process's environment goes in.
            timeout: seconds, after which it is killed with all of its session.
            check: raise where it fails.
            idempotent: no effect here, nothing is sent twice.

        Returns:
            Exit code (128 + number for a signal), stdout and stderr, the middle of long ones cut out.

        Raises:
            SandboxTimeout: it took longer.
            SandboxError: it failed and `check` is set, or the sandbox has ended.
        """
        environment = user_environment(user, env, self.workdir)
        argv, kills = [_BASH, "-c", cmd], self.killed_for_memory
        code, out, err = await self._run(argv, timeout=timeout, env=environment)
        if code == _KILLED and self.killed_for_memory > kills:
            err += f"killed: all processes together held more than {self.limits['memory_mb']} MiB\n"
        return checked((code, out, err), cmd, check=check)

    async def _run(
        self, argv: list[str], *, timeout: float, env: dict[str, str] | None = None, stdin: int | None = None
    ) -> ExecResult:
        with contextlib.ExitStack() as stack:
            out, err = stack.enter_context(PipeReader()), stack.enter_context(PipeReader())
            given = stdin if stdin is not None else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, given)
            files = (given, out.take_end(), err.take_end())
            try:
                request = {"argv": argv, "env": env or user_environment("root", None, "/"), "cwd": self.workdir}
                number, future = await self._ask(files, op="run", **request)
            finally:
                os.close(files[1])
                os.close(files[2])
            code = await self._within(timeout, number, future, what=lambda: (out.text() + err.text())[-500:])
            return code, out.text(), err.text()

    async def _within(self, timeout: float, number: int, future: asyncio.Future[int], *, what: Any) -> int:
        """Wait for an exit code; a request that takes too long, or that nobody waits for any more, is killed."""
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            raise SandboxTimeout(f"a command of the sandbox took more than {timeout:g} s; its end: {what()}") from None
        finally:
            if not future.done() and self.control:
                _leave(future)
                with contextlib.suppress(SandboxError):  # One that has ended runs nothing.
                    _leave((await self._ask(op="kill", job=number))[1])

    async def write_file(self, path: str, data: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file and the directories above it.

        Raises:
            SandboxError: it cannot be written.
        """
        content = file_bytes(data, self.limits["disk_mb"] << 20)
        source = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(os.dup(source), "wb") as file:
            file.write(content)
        os.lseek(source, 0, os.SEEK_SET)
        # Sealed: the sandbox gets the descriptor of memory that nobody can change.
        fcntl.fcntl(source, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        result = await self._run([_BASH, "-c", script, "write_file", path], timeout=_START_S, stdin=source)
        checked(result, f"write_file {path}", check=True)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a regular file; symbolic links are not followed.

        Raises:
            SandboxError: there is no such file, or it is a link, a pipe, a device, too long, or no text.
        """
        return file_text(await self.read_bytes(path), path)

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a regular file, as `read_file`."""
        most = self.limits["disk_mb"] << 20
        with PipeReader(limit=2 * most + 4) as reader:
            end = reader.take_end()
            try:
                number, future = await self._ask((end,), op="read", path=path, limit=most)
            finally:
                os.close(end)
            code = await self._within(_START_S, number, future, what=lambda: path)
            reader.drain()
            if code:
                raise SandboxError(f"cannot read {path} in the sandbox: {reader.text().strip()}")
            if reader.output.seen > most:
                raise SandboxError(f"{path} in the sandbox is longer than {most} bytes")
            return bytes(reader.output.head)

    async def kill_all(self) -> None:
        """Kill every process of the sandbox; its files stay. Nobody changes them any more when this returns."""
        number, future = await self._ask(op="kill_all")
        await self._within(_START_S, number, future, what=lambda: "kill_all")


def _leave(future: asyncio.Future[int]) -> None:
    """Have nobody told that what nobody waits for has failed."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


def _start(control: int) -> subprocess.Popen[bytes]:
    # The package without its __init__, which imports what the process does not need: half of its start.
    program = (
        f"import sys; sys.modules['slime'] = slime = type(sys)('slime'); slime.__path__ = [{_PACKAGE!r}];"
        f" from slime.processes.isolation.init import main; main({control})"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control],
        env={},
        cwd="/",
        start_new_session=True,
    )


def _check_paths(workdir: str, show: Sequence[str]) -> None:
    for name, path in (("workdir", workdir), *(("show", path) for path in show)):
        if not path.startswith("/") or PurePosixPath(path) == PurePosixPath("/") or ".." in path.split("/"):
            raise ValueError(f"{name}={path!r} of a local sandbox: an absolute path without '..' below / is needed")
    for path in show:
        if not os.path.exists(path):
            raise ValueError(f"show={path!r} of a local sandbox: there is no such path on this host")
        shown = PurePosixPath(path)
        if str(shown) in (TMP, "/home") or any(shown.is_relative_to(cover) for cover in (*_COVERED, workdir)):
            own = ", ".join((workdir, TMP, "/home", *_COVERED))
            raise ValueError(f"show={path!r} of a local sandbox: {own} are its own; name a path below {TMP} or /home")
    if any(PurePosixPath(workdir).is_relative_to(path) for path in (*_SHOWN, *show, "/proc", "/dev", "/etc")):
        raise ValueError(f"workdir={workdir!r} of a local sandbox lies in a part that is read-only")
