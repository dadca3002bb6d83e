"""The HTTP client, and small helpers about hosts and ports.

One shared pool of connections per event loop, sized to the engines, because a rollout sends hundreds of small requests
at once; and one for control requests (those with a `timeout_s`), because an abort must not wait for a connection until
one of the generations that it is to end has ended.

    4xx                                            fails at once with its body: asking again cannot help
    5xx, a lost or refused connection, half a JSON tried again with back-off, for `retry_window_s`
    no complete answer in time                     fails: whoever was asked may still be working on it
    a server with an outage (slime.utils.http.network)  waits for its end, and is then sent as if for the first time

Failures of a server that follow each other closely are one incident, of which one warning is logged.

Wait graph: a request without a `timeout_s` waits for the end of an outage; each waits for a connection of its pool and
for the answer, for `timeout_s` in all.
It does not know what is sent: endpoints of an engine are in slime.backends.sglang_utils.server_control.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import random
import secrets
import socket
import subprocess
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from slime.processes.progress import went_on
from slime.utils.async_utils import AsyncLoopThread
from slime.utils.errors import HttpError
from slime.utils.http.api_keys import headers_for
from slime.utils.http.network import OUTAGES, SLIME_HOST_IP_ENV, origin
from slime.utils.misc import get_current_node_ip, get_free_port, is_port_available

if TYPE_CHECKING:
    from slime.config.args import Args


__all__ = [
    "SLIME_HOST_IP_ENV",
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
    "is_new_incident",
    "is_port_available",
    "post",
    "post_body",
    "post_sync",
    "run_router",
    "shared_session",
    "stream_events",
    "set_post_transport",
    "terminate_process",
]
logger = logging.getLogger(__name__)


@dataclass
class HttpLimits:
    """Bounds of the client. `init_http_client` sets them; the defaults serve tools and tests."""

    max_connections: int = 512
    """Of `post` and `get` without a `timeout_s`; more requests wait."""
    request_timeout_s: float = 14400.0
    """One attempt without a `timeout_s`; a long generation is one request."""
    connect_timeout_s: float = 30.0
    retry_window_s: float = 60.0
    """How long after its first failure a request is still retried."""
    max_backoff_s: float = 5.0


PostTransport = Callable[[str, bytes, "dict[str, str] | None", int], Awaitable[Any]]
_Sessions = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, aiohttp.ClientSession]]
_REASON_CHARS = 2000
_LOGGED_CHARS = 300
_INCIDENT_GAP_S = 30.0
"""Without a failure, after which the next one is a new incident."""


class _Client:
    """Owner of the limits, of two sessions per event loop, and of the way that `post` takes."""

    def __init__(self) -> None:
        self.limits = HttpLimits()
        self.transport: PostTransport | None = None
        self._failed_at: dict[str, float] = {}
        self._sessions: _Sessions = weakref.WeakKeyDictionary()

    def session(self, *, is_control: bool = False) -> aiohttp.ClientSession:
        sessions = self._sessions.setdefault(asyncio.get_running_loop(), {})
        session = sessions.get(is_control)
        if session is None or session.closed:
            # Below uvicorn's keep-alive of 5 s: a connection that the server is about to close is never reused.
            limit = 0 if is_control else self.limits.max_connections
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=4.0)
            traces = [_kept_connections()] if is_control else None  # only control requests are sent once more
            jar = aiohttp.DummyCookieJar()  # a balancer's cookie would tie all requests to one engine
            session = aiohttp.ClientSession(
                connector=connector, timeout=self.timeout(None), trace_configs=traces, cookie_jar=jar
            )
            sessions[is_control] = session
        return session

    def timeout(self, timeout_s: float | None) -> aiohttp.ClientTimeout:
        total = self.limits.request_timeout_s if timeout_s is None else timeout_s
        return aiohttp.ClientTimeout(total=total, sock_connect=self.limits.connect_timeout_s)

    def is_new_incident(self, url: str) -> bool:
        """Whether a failure is the first of its server for a while."""
        now = time.monotonic()
        last = self._failed_at.get(origin(url))
        self._failed_at[origin(url)] = now
        return last is None or now - last > _INCIDENT_GAP_S

    async def close(self) -> None:
        for session in self._sessions.pop(asyncio.get_running_loop(), {}).values():
            await session.close()

    def close_all(self) -> None:
        for loop, sessions in list(self._sessions.items()):
            for session in sessions.values() if loop.is_running() else ():
                try:
                    asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=1.0)
                except (TimeoutError, RuntimeError):
                    logger.debug("an HTTP session did not close in time")


def _kept_connections() -> aiohttp.TraceConfig:
    """Notes in a request's `_Attempts` whether it goes over a connection that an earlier request left."""

    async def note(_session: Any, context: Any, _params: Any) -> None:
        if (attempts := context.trace_request_ctx) is not None:
            attempts.is_kept = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


CLIENT = _Client()
atexit.register(CLIENT.close_all)


def get_rollout_num_engines(args: Args) -> int:
    """How many engines answer the default router, as far as the flags say (at least 1)."""
    return max(1, args.rollout_num_engines)


def init_http_client(args: Args) -> None:
    """Size the shared client to the engines of this run; call it once per process, before the first request."""
    CLIENT.limits.max_connections = args.sglang_server_concurrency * get_rollout_num_engines(args)
    CLIENT.limits.request_timeout_s = float(args.sglang_router_request_timeout_secs)


def shared_session(*, is_control: bool = False) -> aiohttp.ClientSession:
    """The running loop's session (`is_control`: that without a wait), for what `post` cannot send. Do not close it."""
    return CLIENT.session(is_control=is_control)


async def close_http_client() -> None:
    """Close the running loop's sessions (a process that ends needs no call)."""
    await CLIENT.close()


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> Any:
    """POST JSON and return the parsed JSON answer, or its text when it is none.

    Args:
        url: full address.
        payload: anything orjson can write; None sends an empty object.
        max_retries: attempts after the first one, within the client's retry window.
        headers: added to the content type.
        timeout_s: makes it a control request: the deadline of an attempt, sent from this process whatever the
            transport. None is the deadline of generations (--sglang-router-request-timeout-secs).

    Raises:
        HttpError: a 4xx answer (at once, with its body), none in time, or the last failure when retrying was given up.
    """
    body = orjson.dumps({} if payload is None else payload, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {**headers_for(url), **(headers or {})} or None
    if timeout_s is not None:
        return await post_body(url, body, headers, max_retries, timeout_s=timeout_s)
    send = CLIENT.transport or post_body
    return await outside_outages(url, lambda: send(url, body, headers, max_retries))


async def outside_outages(url: str, send: Callable[[], Awaitable[Any]]) -> Any:
    """Send a request when its server has no outage, and again where one began meanwhile."""
    while True:
        await OUTAGES.over(url)
        since = time.monotonic()
        try:
            return await send()
        except HttpError as error:
            if error.is_refused or not OUTAGES.has_hit(url, since):
                raise


async def post_body(
    url: str, body: bytes, headers: dict[str, str] | None, max_retries: int, *, timeout_s: float | None = None
) -> Any:
    """`post` from this process, whatever the transport, of a payload that is JSON already."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    attempts = _Attempts("POST", url, max_retries, waits_for_outages=timeout_s is None)
    return await _request(attempts, timeout_s, data=body, headers=headers)


def set_post_transport(transport: PostTransport | None) -> None:
    """Have `post` without a `timeout_s` sent by something else, with the arguments of `post_body`; None undoes it."""
    CLIENT.transport = transport


async def get(url: str, max_retries: int = 60, *, timeout_s: float | None = None) -> Any:
    """GET an address; arguments, answers and errors as in `post`."""

    async def send() -> Any:
        attempts = _Attempts("GET", url, max_retries, waits_for_outages=timeout_s is None)
        return await _request(attempts, timeout_s, headers=headers_for(url))

    return await (send() if timeout_s is not None else outside_outages(url, send))


async def _request(attempts: _Attempts, timeout_s: float | None, **content: Any) -> Any:
    session, timeout = CLIENT.session(is_control=timeout_s is not None), CLIENT.timeout(timeout_s)
    content |= {"trace_request_ctx": attempts, "allow_redirects": not attempts.is_sync}
    while True:
        attempts.is_kept = False
        try:
            async with session.request(attempts.method, attempts.url, timeout=timeout, **content) as answer:
                body = await answer.read()
            return attempts.value(answer.status, answer.content_type, body)
        except (aiohttp.ClientError, TimeoutError, OSError, _TryAgain) as error:
            if attempts.may_repeat(error):
                continue
            is_late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            delay = attempts.next_delay(error, late_s=timeout.total if is_late else None)
        await asyncio.sleep(delay)


async def stream_events(url: str, payload: Any, headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
    """POST JSON and yield the parsed JSON of each server-sent event, until "[DONE]" or the end of the answer.

    Nothing is retried: what was received so far, only the caller knows. The end of an outage is waited for.

    Raises:
        HttpError: a 4xx or 5xx answer (`status` says which), the connection broke, or an outage will not end (`status`
            is None).
    """
    body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    accepts = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    headers = {**accepts, **headers_for(url), **(headers or {})}
    await OUTAGES.over(url)
    try:
        async with shared_session().post(url, data=body, headers=headers) as answer:
            if answer.status >= 400:
                if answer.status >= 500:
                    OUTAGES.suspect(url)
                text = (await answer.read()).decode(errors="replace")[:2000]
                raise HttpError(f"POST {url} was refused: HTTP {answer.status}: {text}", status=answer.status)
            pending: list[bytes] = []
            async for chunk in answer.content.iter_any():  # lines may be longer than aiohttp's own limit of a line
                pending.append(chunk)
                if b"\n" not in chunk:
                    continue
                *lines, rest = b"".join(pending).split(b"\n")
                pending = [rest]
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:"):
                        continue
                    if data == b"[DONE]":
                        return
                    yield orjson.loads(data)
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
        OUTAGES.suspect(url)
        raise HttpError(f"POST {url} broke off: {type(error).__name__}: {error}") from error


class _BlockingLoop(AsyncLoopThread):
    """Where the requests of blocking callers run: not the loop of rollouts, which a user's hook may hold up."""


os.register_at_fork(after_in_child=_BlockingLoop.clear_instances)  # a forked child has the loop, not its thread


def post_sync(url: str, payload: Any = None, *, timeout_s: float = 60.0, max_retries: int = 0) -> Any:
    """Blocking twin of `post`, for code without an event loop; `timeout_s` bounds each attempt.

    A redirect is a refusal. Where the server has closed a connection that was kept, the request is sent once more.
    """
    body = orjson.dumps({} if payload is None else payload, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"Content-Type": "application/json", **headers_for(url)}
    attempts = _Attempts("POST", url, max_retries, is_sync=True)
    return _BlockingLoop().run(_request(attempts, timeout_s, data=body, headers=headers))


def get_sync(url: str, *, timeout_s: float = 60.0, max_retries: int = 0) -> Any:
    """Blocking twin of `get`; `timeout_s` bounds each attempt."""
    return _BlockingLoop().run(get(url, max_retries, timeout_s=timeout_s))


def delete_sync(url: str, *, timeout_s: float = 60.0) -> Any:
    """DELETE an address, blocking; answers and errors as in `post_sync`."""
    attempts = _Attempts("DELETE", url, 0, is_sync=True)
    return _BlockingLoop().run(_request(attempts, timeout_s, headers=headers_for(url)))


class _TryAgain(Exception):
    """An answer that another attempt may better; `status` is its HTTP status."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class _Attempts:
    """One request: what an answer to it is worth, and after a failure whether to wait and how long."""

    def __init__(
        self, method: str, url: str, max_retries: int, *, waits_for_outages: bool = False, is_sync: bool = False
    ) -> None:
        self.method, self.url, self.name = method, url, f"{method} {url}"
        self.max_retries, self.waits_for_outages = max_retries, waits_for_outages
        self.is_sync, self.is_kept, self.was_repeated = is_sync, False, False
        self.failures = 0
        self.first_failure = 0.0

    def may_repeat(self, error: Exception) -> bool:
        """Whether the server had closed the kept connection over which the request went; true once."""
        is_closed = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError) or (
            isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)
        )
        may = self.is_sync and self.is_kept and is_closed and not self.was_repeated
        self.was_repeated = self.was_repeated or may
        return may

    def value(self, status: int, content_type: str, body: bytes) -> Any:
        """What a complete answer holds."""
        if 300 <= status < 400:
            raise HttpError(f"{self.name} was refused: HTTP {status}, a redirect; nothing follows it", status=status)
        if status < 400 and self.method == "POST":  # a health check is no progress
            went_on("answers")
        if status >= 400:
            reason = f"HTTP {status}: {body.decode(errors='replace')[:_REASON_CHARS]}"
            if status == 401:
                reason += " (it asks for an API key, and got none or another: see docs/security.md)"
            if status < 500:
                raise HttpError(f"{self.name} was refused: {reason}", status=status)
            raise _TryAgain(reason, status)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            text = body.decode(errors="replace")
            if text and content_type == "application/json":
                raise _TryAgain(f"an answer that is no complete JSON: {text[:_LOGGED_CHARS]!r}") from None
            return text

    def next_delay(self, error: Exception, *, late_s: float | None) -> float:
        """Seconds to wait before the next attempt; `late_s` is the deadline of an attempt that missed it."""
        OUTAGES.suspect(self.url)
        if late_s is not None:
            raise HttpError(f"{self.name} was not answered within {late_s:g} s") from error
        status, reason = None, f"{type(error).__name__}: {error}"
        if isinstance(error, _TryAgain):
            status, reason = error.status, str(error)
        now, limits = time.monotonic(), CLIENT.limits
        self.failures += 1
        self.first_failure = self.first_failure or now
        spent = now - self.first_failure
        # of no use: it will be sent again anyway, when the outage of its server is over
        is_useless = self.waits_for_outages and OUTAGES.is_on(self.url)
        if self.failures > self.max_retries or spent > limits.retry_window_s or is_useless:
            raise HttpError(
                f"{self.name} failed {self.failures} times in {spent:.0f} s, the last time with {reason}",
                status=status,
            ) from error
        delay = min(0.1 * 2 ** min(self.failures, 10), limits.max_backoff_s) * random.uniform(0.75, 1.25)
        if CLIENT.is_new_incident(self.url):
            what = (self.name, reason[:_LOGGED_CHARS], limits.retry_window_s)
            logger.warning("%s failed (%s); it is sent again, as others that fail there, for up to %.0f s", *what)
        return delay


def is_new_incident(url: str) -> bool:
    """Whether a failure, which happens now, is the first of its server for a while: then it is worth a line."""
    return CLIENT.is_new_incident(url)


def get_host_info() -> tuple[str, str]:
    """(host name, address as other nodes see it)."""
    return socket.gethostname(), get_current_node_ip()


def find_available_port(base_port: int) -> int:
    """A free port at or above `base_port`; starts at a random distance so that two processes rarely pick the same."""
    return get_free_port(base_port + secrets.randbelow(500))


def run_router(args: Args) -> None:
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
