"""Requests to a server behind which nothing answers: they wait, go on, or fail together, and are said once."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
from collections.abc import Iterator

import pytest

from slime.utils import http_utils
from slime.utils.errors import HttpError
from slime.utils.http.network import OUTAGES

BUSY = b'{"error": "no_available_workers"}'


class _Router(http.server.BaseHTTPRequestHandler):
    """Answers 503, as the real one does without engines, until it has some; it counts what it was asked."""

    num_asked = 0
    has_engines = False

    def do_POST(self) -> None:  # noqa: N802
        type(self).num_asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.has_engines else 503)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}" if self.has_engines else BUSY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[tuple[str, type[_Router]]]:
    handler = type("Router", (_Router,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield url, handler
        OUTAGES.end(url)
        server.shutdown()


async def _send(url: str, count: int) -> list[object]:
    try:
        sent = (http_utils.post(f"{url}/generate", {}) for _ in range(count))
        return list(await asyncio.gather(*sent, return_exceptions=True))
    finally:
        await http_utils.close_http_client()


def test_requests_wait_for_the_end_of_an_outage_and_are_not_sent_meanwhile(
    router: tuple[str, type[_Router]],
) -> None:
    url, handler = router
    OUTAGES.begin(url)

    async def main() -> list[object]:
        sending = asyncio.create_task(_send(url, 5))
        await asyncio.sleep(0.1)
        assert handler.num_asked == 0 and not sending.done()
        handler.has_engines = True
        OUTAGES.end(url)
        return await sending

    assert asyncio.run(main()) == [{}] * 5
    assert handler.num_asked == 5


def test_a_request_that_was_being_tried_again_stops_when_the_outage_begins(router: tuple[str, type[_Router]]) -> None:
    url, handler = router

    async def main() -> list[object]:
        sending = asyncio.create_task(_send(url, 1))
        while not handler.num_asked:  # it is refused, and tried again after 0.2 s
            await asyncio.sleep(0.01)
        OUTAGES.begin(url)
        await asyncio.sleep(0.5)  # it would have been tried at 0.2 s, and again 0.4 s later
        assert handler.num_asked <= 2
        handler.has_engines = True
        OUTAGES.end(url)
        return await sending

    assert asyncio.run(main()) == [{}]


def test_requests_fail_at_once_with_the_reason_where_no_engine_will_come(router: tuple[str, type[_Router]]) -> None:
    url, handler = router
    OUTAGES.begin(url)

    async def main() -> list[object]:
        sending = asyncio.create_task(_send(url, 3))
        await asyncio.sleep(0.05)
        OUTAGES.give_up(url, "10 engines were started within an hour")
        return [*await sending, *await _send(url, 1)]

    for error in asyncio.run(main()):
        assert isinstance(error, HttpError) and "10 engines were started" in str(error)
    assert handler.num_asked == 0


def test_a_request_that_fails_just_when_an_outage_is_given_up_says_why(router: tuple[str, type[_Router]]) -> None:
    url, _ = router

    async def send() -> str:
        OUTAGES.begin(url)
        OUTAGES.give_up(url, "engine 0 has ended")
        raise HttpError("no available workers", status=503)

    with pytest.raises(HttpError, match="has no engine any more: engine 0 has ended"):
        asyncio.run(http_utils.outside_outages(url, send))


def test_a_request_that_fails_just_when_the_outage_ends_is_sent_again(router: tuple[str, type[_Router]]) -> None:
    url, handler = router
    attempts = []

    async def send() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            OUTAGES.begin(url)
            OUTAGES.end(url)
            raise HttpError("no available workers", status=503)
        return "answer"

    assert asyncio.run(http_utils.outside_outages(url, send)) == "answer"


def test_a_cancelled_request_does_not_end_the_wait_of_the_others() -> None:
    async def main() -> list[bool]:
        OUTAGES.begin("http://nowhere:1")
        first, second = (asyncio.create_task(OUTAGES.over("http://nowhere:1/generate")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first], timeout=10)
        OUTAGES.end("http://nowhere:1")
        return [first.cancelled(), await second]

    assert asyncio.run(main()) == [True, True]


def test_a_hundred_failures_of_a_server_are_one_warning(
    router: tuple[str, type[_Router]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = router
    monkeypatch.setattr(http_utils.CLIENT.limits, "retry_window_s", 0.3)
    with caplog.at_level(logging.WARNING):
        errors = asyncio.run(_send(url, 50))
    assert all(isinstance(error, HttpError) for error in errors) and handler.num_asked >= 100
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [f"POST {url}/generate failed"]
