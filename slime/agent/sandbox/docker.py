"""Sandboxes that are containers of a Docker daemon, by its Python client; not run against a real daemon yet.

A container has no network unless one is named, limits of memory and processes, the capabilities that `useradd`,
`chown` and `kill` need and no others. It ends by itself after its lifetime, also when nobody is left to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import posixpath
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from slime.agent.sandbox.results import (
    FILE_BYTES,
    ExecResult,
    Output,
    SandboxError,
    SandboxTimeout,
    checked,
    file_bytes,
    file_text,
)
from slime.processes.wait import CallTimeout, DaemonThreads

logger = logging.getLogger(__name__)

_THREADS = DaemonThreads("docker", 64)
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_MARGIN_S = 30.0
_START_S = 600.0  # The image may have to be pulled.
_LABEL = "slime.sandbox"
T = TypeVar("T")


class DockerSandbox:
    """A container.

    Args:
        image: that the daemon has or can pull; it needs bash and coreutils.
        workdir: directory in which commands start; made where it is missing.
        network: name of a Docker network, one from which only the gateway is reached; "none": no network.
        memory_mb: MiB of all processes together.
        processes: how many there may be at a time.
        lifetime_s: seconds after which the container ends by itself.
        base_url: of the daemon; None reads DOCKER_HOST, else the local socket.
    """

    def __init__(
        self,
        image: str,
        *,
        workdir: str = "/workspace",
        network: str = "none",
        memory_mb: int = 1024,
        processes: int = 128,
        lifetime_s: int = 3600,
        base_url: str | None = None,
    ) -> None:
        if not image:
            raise ValueError("a docker sandbox needs an image")
        for name, value in (("memory_mb", memory_mb), ("processes", processes), ("lifetime_s", lifetime_s)):
            if value < 1:
                raise ValueError(f"{name}={value} of a docker sandbox: at least 1")
        self.image, self.workdir, self.network, self.base_url = image, workdir, network, base_url
        self.memory_mb, self.processes, self.lifetime_s = memory_mb, processes, lifetime_s
        self.sandbox_id = ""
        self._name = f"slime-{uuid.uuid4().hex}"
        self._is_given_up = False
        self._client: Any = None
        self._container: Any = None

    async def __aenter__(self) -> Self:
        try:
            await self._call(self._open, wait_s=_START_S)
        except (SandboxError, asyncio.CancelledError):
            self._is_given_up = True  # The thread that makes it may be at work still: it looks at this afterwards.
            if self._container:
                threading.Thread(target=self._remove_by_name, name="docker-remove", daemon=True).start()
            raise
        self.sandbox_id = f"docker-{self._container.short_id}"
        return self

    def _open(self) -> None:
        try:
            from docker.client import DockerClient
        except ImportError:
            raise SandboxError("the docker backend needs its client: pip install docker==7.2.0") from None
        self._client = DockerClient(base_url=self.base_url) if self.base_url else DockerClient.from_env()
        try:
            self._container = self._make()
        finally:
            if self._container is None or self._is_given_up:
                self._remove_by_name()

    def _remove_by_name(self) -> None:
        """Remove a container that nobody will use, where there is one."""
        with contextlib.suppress(SandboxError):
            _translated(lambda: self._client.api.remove_container(self._name, force=True))

    def _make(self) -> Any:
        # Number 1 survives `kill -1`, waits for orphans, and ends the container when its time is over.
        alive = f"end=$(($(date +%s) + {self.lifetime_s})); while [ $(date +%s) -lt $end ]; do sleep 5; done"
        return self._client.containers.run(
            self.image,
            ["sh", "-c", alive],
            name=self._name,
            entrypoint="",
            detach=True,
            auto_remove=True,
            network_mode=self.network,
            mem_limit=f"{self.memory_mb}m",
            memswap_limit=f"{self.memory_mb}m",
            pids_limit=self.processes,
            cap_drop=["ALL"],
            cap_add=list(_CAPABILITIES),
            security_opt=["no-new-privileges"],
            labels={_LABEL: uuid.uuid4().hex},
            working_dir=self.workdir,
        )

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._call(self._close)
        except SandboxError as error:
            logger.warning("%s was not removed, it ends after %d s: %s", self.sandbox_id, self.lifetime_s, error)

    def _close(self) -> None:
        if self._container:
            self._container.remove(force=True)
        if self._client:
            self._client.close()

    async def _call(self, function: Callable[..., T], *arguments: Any, wait_s: float = 120.0) -> T:
        """Call a function of the client in a thread; its errors become SandboxError."""
        try:
            return await _THREADS.run(_translated, function, *arguments, timeout_s=wait_s)
        except CallTimeout:
            raise SandboxError(f"the Docker daemon did not answer in {wait_s:g} s") from None

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
        """Run a command line with bash; what it leaves in the background runs on.

        Raises:
            SandboxTimeout: it took longer than `timeout` seconds and was killed.
            SandboxError: it failed and `check` is set, or the container or the daemon is gone.
        """
        # Docker cannot end a command: `timeout` does it, inside.
        argv = ["timeout", "-s", "KILL", f"{timeout:g}", "bash", "-c", cmd]
        begin = time.monotonic()
        result = await self._call(self._exec, argv, user, dict(env or {}), wait_s=timeout + _MARGIN_S)
        if result[0] in (124, 137) and time.monotonic() - begin >= timeout:
            end = (result[1] + result[2])[-500:]
            raise SandboxTimeout(f"a command of the sandbox took more than {timeout:g} s; its end: {end}")
        return checked(result, cmd, check=check)

    def _exec(self, argv: list[str], user: str, env: dict[str, str]) -> ExecResult:
        if self._container is None:
            raise SandboxError("the sandbox is not open")
        api = self._client.api
        made = api.exec_create(self._container.id, argv, user=user, environment=env, workdir=self.workdir)
        outputs = Output(), Output()
        for parts in api.exec_start(made["Id"], stream=True, demux=True):
            for output, part in zip(outputs, parts, strict=True):
                output.add(part or b"")
        return api.exec_inspect(made["Id"])["ExitCode"], outputs[0].text(), outputs[1].text()

    async def write_file(self, path: str, data: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file and the directories above it; it belongs to `user`.

        Raises:
            SandboxError: it cannot be written.
        """
        folder, name = posixpath.split(path)
        content = file_bytes(data)
        made, _, said = await self._call(self._exec, ["mkdir", "-p", folder], user, {})
        if made:
            raise SandboxError(f"cannot write {path} in the sandbox: {said}")
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), 0o644, int(time.time())
            tar.addfile(member, io.BytesIO(content))
        await self._call(self._container.put_archive, folder, archive.getvalue(), wait_s=600)
        if user != "root":
            await self._call(self._exec, ["chown", user, path], "root", {})

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a regular file; symbolic links are not followed.

        Raises:
            SandboxError: there is no such file, or it is a link, a pipe, a device, too long, or no text.
        """
        if self._container is None:
            raise SandboxError("the sandbox is not open")
        return file_text(await self._call(self._read, path, wait_s=600), path)

    def _read(self, path: str) -> bytes:
        parts, _ = self._container.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(_bounded(parts, path))) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.isreg() else None
            if file is None:
                raise SandboxError(f"{path} in the sandbox is not a regular file")
            return file.read()

    async def kill_all(self) -> None:
        """Kill every process of the container but its first, which does nothing."""
        code, _, said = await self._call(self._exec, ["bash", "-c", "kill -KILL -1; true"], "root", {})
        if code:
            raise SandboxError(f"the processes of the sandbox were not killed: {said}")


def _bounded(parts: Iterable[bytes], path: str) -> bytes:
    data = bytearray()
    for part in parts:
        data += part
        if len(data) > FILE_BYTES + (1 << 16):  # and what a tar adds
            raise SandboxError(f"{path} in the sandbox is longer than {FILE_BYTES} bytes")
    return bytes(data)


def _translated(function: Callable[..., T], *arguments: Any) -> T:
    """Call it; the client's errors become SandboxError."""
    with contextlib.suppress(ImportError):
        import requests
        from docker.errors import DockerException

        try:
            return function(*arguments)
        except (DockerException, requests.RequestException, OSError) as error:
            where = os.environ.get("DOCKER_HOST", "the local socket")
            raise SandboxError(f"Docker daemon ({where}): {error}") from error
    return function(*arguments)  # says which package is missing
