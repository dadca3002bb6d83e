"""POST over kept connections, for the requests that engines answer: a rollout or a gateway sends thousands of them.

aiohttp's parser reads the answers; its client around that parser takes 120 us of CPU a request, this 50. It has no
redirects, cookies, proxies, TLS or compression: whoever needs one of them asks aiohttp's client.

Wait graph: a request waits for one of `max_connections` places, for its connection, and for the answer, all within
`total_s`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import aiohttp
import yarl
from aiohttp.http import HttpProcessingError, HttpResponseParser

_UNBOUNDED = 2**31 - 1
_NO_TYPE = "application/octet-stream"
Answer = tuple[int, str, bytes]
"""Status, content type and body."""


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
    keep_s: float = 4.0
    """How long an unused connection is used again: below uvicorn's keep-alive of 5 s."""


class Connections:
    """The kept connections of an event loop, to whatever hosts.

    Args:
        limits: of the requests at a time; more wait.
    """

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Connections] = WeakKeyDictionary()

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.max_connections)
        self._kept: dict[tuple[str, int], list[_Connection]] = {}

    @classmethod
    def of_loop(cls, limits: HttpLimits) -> Connections:
        """Those of the running loop, made at first use."""
        loop = asyncio.get_running_loop()
        if (connections := cls._of_loops.get(loop)) is None:
            connections = cls._of_loops[loop] = cls(limits)
        return connections

    @classmethod
    def close_those_of_loop(cls) -> None:
        """Close the running loop's connections that are not in use."""
        if (connections := cls._of_loops.pop(asyncio.get_running_loop(), None)) is not None:
            connections.close()

    async def post(self, url: str, body: bytes, headers: dict[str, str], *, total_s: float) -> Answer:
        """Send a body, and return the whole answer.

        Raises:
            aiohttp.ClientError: the connection could not be made, or it ended before the answer did.
            TimeoutError: the answer was not there in time; aiohttp.ConnectionTimeoutError, the connection was not.
            ValueError: a header has a line break.
        """
        place, head = _target(url)
        request = _head(head, len(body), headers) + body
        async with asyncio.timeout(total_s), self._places:
            connection = self._take(place) or await self._open(*place)
            try:
                answer = await connection.ask(request)
            finally:
                if connection.is_reusable:
                    connection.kept_since = time.monotonic()
                    self._kept.setdefault(place, []).append(connection)
                else:
                    connection.close()
        return answer

    def _take(self, place: tuple[str, int]) -> _Connection | None:
        kept = self._kept.get(place, [])
        while kept:
            connection = kept.pop()  # the latest: the others grow old
            if connection.is_reusable and time.monotonic() - connection.kept_since < self._limits.keep_s:
                return connection
            connection.close()
        return None

    async def _open(self, host: str, port: int) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                return (await loop.create_connection(lambda: _Connection(loop), host, port))[1]
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(
                f"no connection to {host}:{port} in {self._limits.connect_timeout_s:g} s"
            ) from error
        except OSError as error:
            raise aiohttp.ClientConnectionError(
                f"cannot connect to {host}:{port}: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connections in self._kept.values():
            for connection in connections:
                connection.close()
        self._kept.clear()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    connected, _reading_paused = True, False  # aiohttp's reader of bodies looks at them

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.kept_since = loop, 0.0
        self._parser: Any = None
        self._transport: Any = None
        self._message: tuple[Any, Any] | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self.is_reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> Answer:
        """Send a request, and return its answer."""
        keys: dict[str, Any] = {"payload_exception": aiohttp.ClientPayloadError, "read_until_eof": True}
        self._parser = HttpResponseParser(cast(Any, self), self._loop, _UNBOUNDED, auto_decompress=False, **keys)
        self._message, self._answer, self.is_reusable = None, self._loop.create_future(), False
        self._transport.write(request)  # at once: two pieces are two system calls
        return await self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # nothing was asked: the server does not speak HTTP
            self.close()
            return
        try:
            messages, _, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._fail(aiohttp.ClientPayloadError(f"an answer that is no HTTP: {error}"))
            return
        for message in messages:
            self._message = message if message[0].code >= 200 else None  # others come before the answer
        self._end_if_whole(keeps=True)

    def _end_if_whole(self, *, keeps: bool) -> None:
        if self._message is None or self._answer is None or self._answer.done():
            return
        head, body = self._message
        if (error := body.exception()) is not None:
            self._fail(error)
        elif body.is_eof():
            self.is_reusable = keeps and not head.should_close
            kind = head.headers.get("Content-Type", _NO_TYPE).partition(";")[0].strip().lower()
            self._answer.set_result((head.code, kind, body.read_nowait(-1)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = self.connected = False
        if self._answer is None or self._answer.done():
            return
        try:
            self._parser.feed_eof()
        except (HttpProcessingError, aiohttp.ClientError) as broken:
            self._fail(aiohttp.ClientPayloadError(f"the answer broke off: {broken}"))
        self._end_if_whole(keeps=False)
        self._fail(error or aiohttp.ServerDisconnectedError())

    def _fail(self, error: BaseException) -> None:
        self.is_reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """End the connection: an engine that still answers notices."""
        self.is_reusable = False
        self._transport.abort()

    def pause_reading(self) -> None:
        """Do nothing: an answer is held as a whole anyway."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Do nothing, as reading is never paused."""


@functools.lru_cache(maxsize=1024)
def _target(url: str) -> tuple[tuple[str, int], str]:
    """(host and port of an address, the head of a POST to it)."""
    parsed = yarl.URL(url)
    assert parsed.host is not None and parsed.port is not None, url
    head = f"POST {parsed.raw_path_qs} HTTP/1.1\r\nHost: {parsed.host_port_subcomponent}\r\nAccept: */*\r\n"
    return (parsed.host, parsed.port), head


def _head(begin: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError(f"a header has a line break: {sorted(headers)}")
    return (begin + "\r\n".join([*lines, f"Content-Length: {length}", "", ""])).encode()
