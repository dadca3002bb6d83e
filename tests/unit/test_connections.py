"""POST over kept connections: every form of an answer is read whole; a connection is used again only where it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from slime.utils.http.connections import Answer, Connections, HttpLimits
from slime.utils.http_utils import close_http_client, post

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"


class Server:
    """Answers each request with the next of its texts, and with the last one again; then closes where that is said."""

    def __init__(self, *answers: bytes, closes: bool = False) -> None:
        self.answers, self.closes = list(answers), closes
        self.connections = self.ended = 0
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                for part in answer.split(b"|"):  # each comes alone
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if self.closes:
                    break
        self.ended += 1
        writer.close()


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/a?b=1"
    listening.close()
    async with asyncio.timeout(20):
        while server.ended < server.connections:
            await asyncio.sleep(0.01)


def ask(
    server: Server,
    *,
    count: int = 1,
    at_once: bool = False,
    keep_s: float = 9.0,
    limit: int = 8,
    total_s: float = 30.0,
) -> list[Answer]:
    """The answers to some requests, one after the other or at once."""

    async def run() -> list[Answer]:
        connections = Connections(HttpLimits(max_connections=limit, keep_s=keep_s))
        async with running(server) as url:
            asked = [connections.post(url, b"{}", {"X-Key": "k"}, total_s=30.0) for _ in range(count)]
            try:
                return await asyncio.gather(*asked) if at_once else [await one for one in asked]
            finally:
                connections.close()

    return asyncio.run(run())


FORMS = {
    "a length": JSON + b"Content-Length: 5\r\n\r\n[1,2]",
    "pieces": JSON[:20] + b"|" + JSON[20:] + b"Content-Le|ngth: 5\r\n\r\n|[1,|2]",
    "chunks": JSON + b"Transfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n|2\r\n2]\r\n|0\r\n\r\n",
    "a 100 before": b"HTTP/1.1 100 Continue\r\n\r\n|" + JSON + b"Content-Length: 5\r\n\r\n[1,2]",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_is_read_whole_and_its_connection_used_again(form: bytes) -> None:
    server = Server(form)
    assert ask(server, count=3) == [(200, "application/json", b"[1,2]")] * 3
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"POST /a?b=1 HTTP/1.1" and b"X-Key: k" in head and body == b"{}"


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    server = Server(JSON + b"\r\n[1,|2]", closes=True)
    assert ask(server, count=2) == [(200, "application/json", b"[1,2]")] * 2
    assert server.connections == 2


def test_a_connection_that_its_server_will_close_is_not_used_again() -> None:
    server = Server(JSON + b"Connection: close\r\nContent-Length: 2\r\n\r\n[]")
    assert len(ask(server, count=2)) == server.connections == 2


def test_a_connection_that_was_unused_for_too_long_is_not_used_again() -> None:
    server = Server(JSON + b"Content-Length: 2\r\n\r\n[]")
    assert len(ask(server, count=2, keep_s=0.0)) == server.connections == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", aiohttp.ServerDisconnectedError),
        (JSON + b"Content-Length: 9\r\n\r\n[1,", aiohttp.ClientPayloadError),
        (JSON + b"Transfer-Encoding: chunked\r\n\r\n9\r\n[1,", aiohttp.ClientPayloadError),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", aiohttp.ClientPayloadError),
    ],
    ids=["nothing", "half a length", "half a chunk", "no HTTP"],
)
def test_an_answer_that_breaks_off_is_an_error(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        ask(Server(answer, closes=True))


def test_requests_beyond_the_limit_wait_for_a_place() -> None:
    server = Server(JSON + b"Content-Length: 2\r\n\r\n[|]")
    assert len(ask(server, count=6, at_once=True, limit=2)) == 6
    assert server.connections == 2


def test_an_answer_that_is_late_ends_its_connection_so_that_the_engine_notices() -> None:
    server = Server(JSON + b"Content-Length: 2\r\n\r\n[")

    async def run() -> None:
        connections = Connections(HttpLimits(max_connections=1, keep_s=9.0))
        async with running(server) as url:
            with pytest.raises(TimeoutError):
                await connections.post(url, b"{}", {}, total_s=0.2)  # `running` waits for the end of the connection

    asyncio.run(run())


def test_a_header_with_a_line_break_is_not_sent() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="a header has a line break"):
            await Connections(HttpLimits(max_connections=1, keep_s=9.0)).post(
                "http://127.0.0.1:9/", b"", {"X-Key": "a\r\nX-Other: b"}, total_s=1
            )

    asyncio.run(run())


def test_a_redirect_of_a_generation_is_followed() -> None:
    async def moved(_request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/there")

    async def there(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/here", moved), web.post("/there", there)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        assert await post(f"http://127.0.0.1:{runner.addresses[0][1]}/here", {"a": 1}) == {"a": 1}
        await close_http_client()
        await runner.cleanup()

    asyncio.run(run())
