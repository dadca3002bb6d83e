"""Sandboxes of the E2B service, by its Python client; not run against the real service yet.

The service starts a template of its own; the image of a task is named in the metadata of the request, under a key that
the operator of the service has chosen.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from slime.agent.sandbox.results import (
    END_AGENT,
    ExecResult,
    Output,
    SandboxError,
    SandboxTimeout,
    checked,
    file_bytes,
    file_text,
    retried,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Errors of the connection, by the names of their classes: the client's HTTP library is its own affair.
_TRANSPORT = {
    "ConnectError",
    "ConnectTimeout",
    "PoolTimeout",
    "ReadError",
    "ReadTimeout",
    "RemoteProtocolError",
    "WriteError",
    "WriteTimeout",
}
_MARGIN_S = 30.0
_LOST = ("does not exist", "STOPPED state")


class _Transient(SandboxError):
    """An error after which the same request may succeed."""


class E2BSandbox:
    """A sandbox of the service, which E2B_API_KEY and E2B_DOMAIN name.

    Args:
        image: of the task.
        timeout: seconds after which the service ends it; None reads SLIME_AGENT_SANDBOX_LIFETIME_SEC, else 3600.
        image_metadata_key: key of the metadata that carries the image; None reads
            SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY.
        rpc_retries: tries of a request; None reads SLIME_AGENT_SANDBOX_RPC_RETRIES, else 6.
        size: in the metadata, too; None reads SLIME_AGENT_E2B_SANDBOX_SIZE, else "md".
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        self.image = image
        self.timeout = timeout or _number("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "SWE_SANDBOX_LIFETIME_SEC", 3600)
        self.tries = rpc_retries or _number("SLIME_AGENT_SANDBOX_RPC_RETRIES", "SWE_RPC_RETRIES", 6)
        names = "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY"
        self.key = image_metadata_key or _setting(*names)
        self.size = size or _setting("SLIME_AGENT_E2B_SANDBOX_SIZE", "SWE_E2B_SANDBOX_SIZE") or "md"
        self._sandbox: Any = None

    @property
    def sandbox_id(self) -> str:
        """The service's name of it; empty before it is open."""
        return str(self._sandbox.sandbox_id) if self._sandbox else ""

    async def __aenter__(self) -> Self:
        if not self.key:
            raise SandboxError(
                "an e2b sandbox needs the metadata key that carries the image:"
                " set SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY or image_metadata_key"
            )
        try:
            from e2b import AsyncSandbox
        except ImportError:
            raise SandboxError("the e2b backend needs its client: pip install e2b==2.63.0") from None
        metadata = {self.key: self.image, f"{self.key.partition('/')[0]}/size": self.size}
        self._sandbox = await self._call(lambda: AsyncSandbox.create(timeout=self.timeout, metadata=metadata))
        return self

    async def __aexit__(self, *_: object) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox:
            try:
                await self._call(sandbox.kill)
            except SandboxError as error:
                logger.warning("sandbox %s was not ended, the service will do it: %s", sandbox.sandbox_id, error)

    async def _call(self, call: Callable[[], Awaitable[T]], *, again: bool = True) -> T:
        return await retried(lambda: _translated(call), (_Transient,), tries=self.tries if again else 1)

    def _opened(self) -> Any:
        if self._sandbox is None:
            raise SandboxError("the sandbox is not open")
        return self._sandbox

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
        """Run a command line with a login bash.

        Args:
            idempotent: it may be sent again where the connection breaks.

        Raises:
            SandboxTimeout: it took longer than `timeout` seconds.
            SandboxError: it failed and `check` is set, or the service did.
        """
        sandbox = self._opened()

        async def run() -> ExecResult:
            from e2b import CommandExitException

            out, err = Output(), Output()
            try:
                done = await sandbox.commands.run(
                    cmd,
                    user=user,
                    envs=dict(env or {}),
                    timeout=timeout,
                    on_stdout=lambda text: out.add(text.encode()),
                    on_stderr=lambda text: err.add(text.encode()),
                    retain_output=False,
                )
                code = done.exit_code
            except CommandExitException as error:
                code = error.exit_code
            return code, out.text(), err.text()

        async def run_in_time() -> ExecResult:
            # The service keeps the time; it may be stuck itself.
            try:
                return await asyncio.wait_for(run(), timeout + _MARGIN_S)
            except TimeoutError:
                raise SandboxTimeout(f"e2b did not end a command of {timeout:g} s") from None

        return checked(await self._call(run_in_time, again=idempotent), cmd, check=check)

    async def write_file(self, path: str, data: str | bytes | Path, *, user: str = "root") -> None:
        """Write a file and the directories above it.

        Raises:
            SandboxError: it cannot be written.
        """
        content, sandbox = file_bytes(data), self._opened()
        await self._call(lambda: sandbox.files.write(path, content, user=user))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a file.

        Raises:
            SandboxError: there is no such file, or it is no text.
        """
        sandbox = self._opened()
        return file_text(bytes(await self._call(lambda: sandbox.files.read(path, format="bytes", user=user))), path)

    async def kill_all(self) -> None:
        """Kill every process of the user `agent`; root's are the service's own."""
        await self.exec(END_AGENT, check=True)


async def _translated(call: Callable[[], Awaitable[T]]) -> T:
    """Call the client; its errors become SandboxError."""
    from e2b import NotFoundException, SandboxException, TimeoutException
    from httpx import HTTPError

    try:
        return await call()
    except SandboxError:
        raise
    except TimeoutException as error:
        # The client calls a sandbox that it does not reach a timeout, too.
        kind: type[SandboxError] = _Transient if "could not be reached" in str(error) else SandboxTimeout
        raise kind(f"e2b: {error}") from error
    except NotFoundException as error:
        raise SandboxError(f"e2b: {error}") from error
    except SandboxException as error:
        is_lost = any(text in str(error) for text in _LOST)
        raise (SandboxError if is_lost else _Transient)(f"e2b, {type(error).__name__}: {error}") from error
    except (HTTPError, OSError) as error:
        names = {parent.__name__ for parent in type(error).__mro__}
        kind = _Transient if names & _TRANSPORT or isinstance(error, OSError) else SandboxError
        raise kind(f"e2b, {type(error).__name__}: {error}") from error


def _setting(name: str, legacy: str) -> str:
    return os.environ.get(name) or os.environ.get(legacy) or ""


def _number(name: str, legacy: str, default: int) -> int:
    text = _setting(name, legacy)
    if text and (not text.isdigit() or int(text) < 1):
        raise ValueError(f"{name}={text!r} in the environment: a whole number of at least 1 is needed")
    return int(text or default)
