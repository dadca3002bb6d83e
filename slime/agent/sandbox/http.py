"""Sandboxes on other hosts, which run `python -m slime.agent.sandbox_server`.

A request that is sent twice is done once: each bears an id that the server remembers. A sandbox whose owner is silent
for a minute ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp

from slime.agent.sandbox.access import GatewayAccess
from slime.agent.sandbox.results import (
    SERVER_KEY_ENV,
    ExecResult,
    SandboxError,
    SandboxTimeout,
    checked,
    file_bytes,
    file_text,
    retried,
)

logger = logging.getLogger(__name__)

TRIES = 6
_MARGIN_S = 30.0
T = TypeVar("T")


class HttpSandbox:
    """A local sandbox of another host.

    Args:
        image: no effect, hosts show their own programs.
        urls: of the servers; one is picked at random, the next one where it is full or does not answer.
        key: that the servers ask for; None reads SLIME_SANDBOX_KEY.
        gateway: the one server that the sandbox reaches, through its host.
        options: `workdir`, `memory_mb`, `disk_mb`, `processes`, as for a local sandbox.
    """

    def __init__(
        self,
        image: str = "",
        *,
        urls: Sequence[str] = (),
        key: str | None = None,
        gateway: GatewayAccess | None = None,
        **options: Any,
    ) -> None:
        if isinstance(urls, str) or not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"urls={urls!r} of an http sandbox: a list of http:// addresses is needed")
        if not (key or os.environ.get(SERVER_KEY_ENV)):
            raise ValueError(
                f"an http sandbox needs the servers' key: key=..., or {SERVER_KEY_ENV} in the environment"
            )
        if image:
            logger.warning("image %r has no effect: http sandboxes show their host's own programs", image)
        self.urls, self.gateway, self.options = [url.rstrip("/") for url in urls], gateway, options
        self.sandbox_id = ""
        self._headers = {"Authorization": f"Bearer {key or os.environ[SERVER_KEY_ENV]}"}
        self._session: aiohttp.ClientSession | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        async with contextlib.AsyncExitStack() as until_open:
            until_open.push_async_callback(self._session.close)
            lease_s = await self._again(self._make_somewhere)
            self._renewing = asyncio.create_task(self._renew(lease_s))
            until_open.pop_all()
        return self

    async def _make_somewhere(self) -> float:
        """Make it on the first server that has room; the seconds after which a silent owner loses it."""
        body: dict[str, Any] = {"options": self.options}
        if self.gateway:
            body["gateway"] = {"url": self.gateway.url, "key": self.gateway.key, "port": self.gateway.port}
        failure: Exception = SandboxError("no server")
        for url in random.sample(self.urls, len(self.urls)):
            name = uuid.uuid4().hex
            self._url = f"{url}/sandboxes/{name}"
            try:
                answer = await self._send("PUT", "", json=body)
            except (aiohttp.ClientError, _Busy, _Silent) as error:  # what a silent one makes yet, it ends: no lease
                failure = error
                continue
            self.sandbox_id = f"{url.partition('://')[2]}/{name}"
            return float(answer["lease_s"])
        raise failure

    async def _renew(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 4)
            with contextlib.suppress(aiohttp.ClientError, SandboxError):
                await self._send("POST", "/lease", json={})

    async def __aexit__(self, *_: object) -> None:
        if self._renewing:
            self._renewing.cancel()
        if self._session:
            try:
                await self._again(lambda: self._send("DELETE", ""), tries=2)
            except (aiohttp.ClientError, SandboxError) as error:
                logger.warning("sandbox %s was not ended, its server will do it: %s", self.sandbox_id, error)
            await self._session.close()
            self._session = None

    async def _send(self, method: str, path: str, *, wait_s: float = _MARGIN_S, **content: Any) -> Any:
        if self._session is None:
            raise SandboxError("the sandbox is not open")
        timeout = aiohttp.ClientTimeout(total=wait_s, sock_connect=10)
        try:
            async with self._session.request(method, self._url + path, timeout=timeout, **content) as answer:
                if answer.status == 200 and answer.content_type == "application/octet-stream":
                    return await answer.read()
                if answer.status == 200:
                    return await answer.json()
                said = (await answer.text())[:1000]
        except aiohttp.ClientConnectionError:
            raise
        except TimeoutError:
            raise _Silent(f"{self._url} did not answer in {wait_s:g} s") from None
        if answer.status == 503:
            raise _Busy(f"{self._url} has no room: {said}")
        if answer.status == 408:
            raise SandboxTimeout(said)
        raise SandboxError(f"sandbox server, {answer.status}: {said}")

    async def _again(self, call: Callable[[], Awaitable[T]], *, tries: int = TRIES) -> T:
        try:
            return await retried(call, _TRANSIENT, tries=tries)
        except SandboxError:
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxError(f"{self._url} does not answer: {type(error).__name__}: {error}") from error

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
        """Run a command line, as a local sandbox does; once, also where the connection breaks meanwhile.

        Raises:
            SandboxTimeout: it took longer than `timeout` seconds.
            SandboxError: it failed and `check` is set, or the server has the sandbox no more.
        """
        body = {"cmd": cmd, "user": user, "env": dict(env or {}), "timeout": timeout, "request": uuid.uuid4().hex}
        answer = await self._again(lambda: self._send("POST", "/exec", wait_s=timeout + _MARGIN_S, json=body))
        return checked((answer["exit"], answer["stdout"], answer["stderr"]), cmd, check=check)

    async def write_file(self, path: str, data: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file, as a local sandbox does."""
        content = file_bytes(data)
        place = {"path": path}
        await self._again(lambda: self._send("PUT", "/files", wait_s=600, params=place, data=content))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a file, as of a local sandbox."""
        data = await self._again(lambda: self._send("GET", "/files", wait_s=600, params={"path": path}))
        return file_text(data, path)

    async def kill_all(self) -> None:
        """Kill every process of the sandbox."""
        await self._again(lambda: self._send("POST", "/kill_all", json={}))


class _Busy(SandboxError):
    """A server has no room for another sandbox."""


class _Silent(SandboxError):
    """A server has not answered in time."""


_TRANSIENT = (aiohttp.ClientConnectionError, _Busy)
