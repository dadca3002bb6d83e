"""The HTTP client, and small helpers about hosts and ports.

One shared aiohttp session per event loop, sized to the engines, because a rollout sends hundreds of small requests
at once. A 4xx answer fails at once with its body: asking again cannot help. 5xx answers and connection errors are
retried with back-off inside a deadline.
It does not know what is sent: endpoints of an engine are in slime.backends.sglang_utils.server_control.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import secrets
import socket
import subprocess
import time
import weakref
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import requests

from slime.utils.errors import HttpError
from slime.utils.misc import get_current_node_ip, get_free_port, is_port_available

__all__ = [
    "HttpError",
    "HttpLimits",
    "close_http_client",
    "delete_sync",
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "get_sync",
    "init_http_client",
    "is_port_available",
    "parse_body",
    "post",
    "post_body",
    "post_sync",
    "run_router",
    "shared_session",
    "set_post_transport",
    "terminate_process",
]
logger = logging.getLogger(__name__)


@dataclass
class HttpLimits:
    """Bounds of the client. `init_http_client` sets them; the defaults serve tools and tests."""

    max_connections: int = 512
    request_timeout_s: float = 14400.0
    """One attempt; a long generation is one request."""
    retry_window_s: float = 60.0
    """How long after its first failure a request is still retried."""
    max_backoff_s: float = 5.0


PostTransport = Callable[[str, bytes, "dict[str, str] | None", int], Awaitable[Any]]
_Sessions = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]


class _Client:
    """Owner of the limits, of one session per event loop, and of the way that `post` takes."""

    def __init__(self) -> None:
        self.limits = HttpLimits()
        self.transport: PostTransport | None = None
        self._sessions: _Sessions = weakref.WeakKeyDictionary()

    def session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # Below uvicorn's keep-alive of 5 s: a connection that the server is about to close is never reused.
            connector = aiohttp.TCPConnector(limit=self.limits.max_connections, keepalive_timeout=4.0)
            timeout = aiohttp.ClientTimeout(total=self.limits.request_timeout_s, sock_connect=30.0)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout)
            self._sessions[loop] = session
        return session

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def close_all(self) -> None:
        for loop, session in list(self._sessions.items()):
            if loop.is_running():
                try:
                    asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=1.0)
                except (TimeoutError, RuntimeError):
                    logger.debug("an HTTP session did not close in time")


_client = _Client()
atexit.register(_client.close_all)


def get_rollout_num_engines(args: Namespace) -> int:
    """How many engines answer the default router, as far as the flags say (at least 1)."""
    return max(1, args.rollout_num_engines)


def init_http_client(args: Namespace) -> None:
    """Size the shared client to the engines of this run; call it once per process, before the first request."""
    _client.limits.max_connections = args.sglang_server_concurrency * get_rollout_num_engines(args)
    _client.limits.request_timeout_s = float(args.sglang_router_request_timeout_secs)


def shared_session() -> aiohttp.ClientSession:
    """The running loop's session, for requests that `post` and `get` cannot make. Do not close it."""
    return _client.session()


async def close_http_client() -> None:
    """Close the running loop's session (a process that ends needs no call)."""
    await _client.close()


async def post(url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """POST JSON and return the parsed JSON answer, or its text when it is none.

    Args:
        url: full address.
        payload: anything orjson can write; None sends an empty object.
        max_retries: attempts after the first one, within the client's retry window.
        headers: added to the content type.

    Raises:
        HttpError: a 4xx answer (at once, with its body), or the last failure when retrying was given up.
    """
    body = orjson.dumps({} if payload is None else payload, option=orjson.OPT_SERIALIZE_NUMPY)
    return await (_client.transport or post_body)(url, body, headers, max_retries)


async def post_body(url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
    """`post` from this process, whatever the transport, of a payload that is JSON already."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    return await _request("POST", url, body=body, headers=headers, max_retries=max_retries)


def set_post_transport(transport: PostTransport | None) -> None:
    """Have every `post` of this process sent by something else, with the arguments of `post_body`; None undoes it."""
    _client.transport = transport


async def get(url: str, max_retries: int = 60) -> Any:
    """GET an address; answers and errors as in `post`."""
    return await _request("GET", url, body=None, headers=None, max_retries=max_retries)


async def _request(
    method: str, url: str, *, body: bytes | None, headers: dict[str, str] | None, max_retries: int
) -> Any:
    attempts = _Attempts(method, url, max_retries)
    while True:
        try:
            async with _client.session().request(method, url, data=body, headers=headers) as answer:
                content = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            delay = attempts.next_delay(None, f"{type(error).__name__}: {error}", cause=error)
        else:
            if status < 400:
                return parse_body(content)
            delay = attempts.next_delay(status, content.decode(errors="replace"))
        await asyncio.sleep(delay)


def post_sync(url: str, payload: Any = None, *, timeout_s: float = 60.0, max_retries: int = 0) -> Any:
    """Blocking twin of `post`, for code without an event loop; `timeout_s` bounds each attempt."""
    body = orjson.dumps({} if payload is None else payload, option=orjson.OPT_SERIALIZE_NUMPY)
    return _request_sync("POST", url, body=body, timeout_s=timeout_s, max_retries=max_retries)


def get_sync(url: str, *, timeout_s: float = 60.0, max_retries: int = 0) -> Any:
    """Blocking twin of `get`; `timeout_s` bounds each attempt."""
    return _request_sync("GET", url, body=None, timeout_s=timeout_s, max_retries=max_retries)


def delete_sync(url: str, *, timeout_s: float = 60.0) -> Any:
    """DELETE an address, blocking; answers and errors as in `post`."""
    return _request_sync("DELETE", url, body=None, timeout_s=timeout_s, max_retries=0)


def _request_sync(method: str, url: str, *, body: bytes | None, timeout_s: float, max_retries: int) -> Any:
    attempts = _Attempts(method, url, max_retries)
    while True:
        try:
            headers = {"Content-Type": "application/json"} if body is not None else None
            with requests.Session() as session:
                session.trust_env = False  # engines are reached directly, as aiohttp does: never through HTTP_PROXY
                answer = session.request(method, url, data=body, headers=headers, timeout=timeout_s)
        except requests.RequestException as error:
            delay = attempts.next_delay(None, f"{type(error).__name__}: {error}", cause=error)
        else:
            if answer.status_code < 400:
                return parse_body(answer.content)
            delay = attempts.next_delay(answer.status_code, answer.text)
        time.sleep(delay)


class _Attempts:
    """Decides after each failure of one request: wait how long, or give up with which sentence."""

    def __init__(self, method: str, url: str, max_retries: int) -> None:
        self.name, self.max_retries = f"{method} {url}", max_retries
        self.failures = 0
        self.first_failure = 0.0

    def next_delay(self, status: int | None, reason: str, *, cause: BaseException | None = None) -> float:
        reason = f"HTTP {status}: {reason[:2000]}" if status is not None else reason
        if status is not None and status < 500:
            raise HttpError(f"{self.name} was refused: {reason}", status=status)
        now = time.monotonic()
        self.failures += 1
        self.first_failure = self.first_failure or now
        spent, limits = now - self.first_failure, _client.limits
        if self.failures > self.max_retries or spent > limits.retry_window_s:
            raise HttpError(
                f"{self.name} failed {self.failures} times in {spent:.0f} s, the last time with {reason}",
                status=status,
            ) from cause
        delay = min(0.1 * 2 ** min(self.failures, 10), limits.max_backoff_s) * random.uniform(0.75, 1.25)
        logger.warning("%s failed (%s); attempt %d in %.1f s", self.name, reason, self.failures + 1, delay)
        return delay


def parse_body(content: bytes) -> Any:
    """JSON if it is JSON, else the text."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def get_host_info() -> tuple[str, str]:
    """(host name, address as other nodes see it)."""
    return socket.gethostname(), get_current_node_ip()


def find_available_port(base_port: int) -> int:
    """A free port at or above `base_port`; starts at a random distance so that two processes rarely pick the same."""
    return get_free_port(base_port + secrets.randbelow(500))


def run_router(args: Any) -> None:
    """Run an SGLang router in this process until it ends; `args` are `sglang_router`'s RouterArgs."""
    from sglang_router.launch_router import launch_router

    launch_router(args)


def terminate_process(process: subprocess.Popen[Any] | Any, timeout: float = 1.0) -> None:
    """End a child process (subprocess or multiprocessing): terminate, wait `timeout` seconds, then kill."""
    wait = process.wait if isinstance(process, subprocess.Popen) else process.join
    process.terminate()
    try:
        wait(timeout)
    except subprocess.TimeoutExpired:
        logger.debug("process %s ignored SIGTERM for %.1f s", process.pid, timeout)
    is_alive = process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()
    if is_alive:
        process.kill()
        wait(timeout)
