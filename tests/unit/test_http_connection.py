"""Blocking requests: a connection is used again, opened anew where its server ended it, and an attempt has an end."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime.processes.wait import wait
from slime.utils.errors import HttpError
from slime.utils.http_utils import delete_sync, get_sync, post_sync


class Server(ThreadingHTTPServer):
    """Counts its connections, and those that have ended; ends one `patience_s` seconds after an answer."""

    connections, ended, patience_s = 0, 0, 600.0
    drip_s = 0.0
    """Between two bytes of an answer."""
    drips_head = False
    drops_kept = False
    """End a connection when a second request comes over it, without an answer."""
    redirects_to = ""
    asked = 0

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.ended += 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        if self.server.drip_s:
            return self.drip()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
        self.connection.settimeout(self.server.patience_s)  # what uvicorn's timeout_keep_alive does

    def do_POST(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.drops_kept and self.requestline_count():
            self.close_connection = True
            return
        self.send_response(307 if self.server.redirects_to else 200)
        if self.server.redirects_to:
            self.send_header("Location", self.server.redirects_to)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_DELETE = do_POST

    def requestline_count(self) -> int:
        """How many requests came over this connection before."""
        self.count = getattr(self, "count", -1) + 1
        return self.count

    def drip(self) -> None:
        """An answer of 200 bytes, one after the other: of its head, or of its body."""
        self.close_connection = True
        head = b"HTTP/1.1 200 OK\r\n"
        self.wfile.write(head + (b"X-Long: " if self.server.drips_head else b"Content-Length: 200\r\n\r\n"))
        with suppress(OSError):  # whoever asked has gone
            for _ in range(200):
                self.wfile.write(b"x")
                threading.Event().wait(self.server.drip_s)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(server: Server, *, timeout_s: float = 60) -> str:
    return str(get_sync(f"http://127.0.0.1:{server.server_port}/", timeout_s=timeout_s))


def test_a_second_request_goes_over_the_connection_of_the_first(server: Server) -> None:
    assert [ask(server), ask(server)] == ["ok", "ok"]
    assert server.connections == 1


def test_a_connection_that_the_server_ended_is_opened_anew(server: Server) -> None:
    server.patience_s = 0.05
    ask(server)
    wait("the server to end it", 60, lambda: server.ended == 1, interval_s=0.01)
    assert ask(server) == "ok"
    assert server.connections == 2


def test_a_post_over_a_kept_connection_that_ends_is_sent_once_more_and_no_further(server: Server) -> None:
    server.drops_kept = True
    url = f"http://127.0.0.1:{server.server_port}/"
    assert [post_sync(url), post_sync(url)] == ["ok", "ok"]
    assert (server.asked, server.connections) == (3, 2)


@pytest.mark.parametrize("send", [post_sync, delete_sync])
def test_a_redirect_is_a_refusal_and_is_not_followed(server: Server, send: Callable[[str], object]) -> None:
    server.redirects_to = f"http://127.0.0.1:{server.server_port}/elsewhere"
    with pytest.raises(HttpError, match="HTTP 307, a redirect") as refusal:
        send(f"http://127.0.0.1:{server.server_port}/")
    assert refusal.value.is_refused and server.asked == 1


@pytest.mark.parametrize("drips_head", [False, True])
def test_an_answer_that_drips_misses_the_deadline_of_the_attempt(server: Server, drips_head: bool) -> None:
    server.drip_s, server.drips_head = 0.1, drips_head
    begun = time.monotonic()
    with pytest.raises(HttpError, match=r"was not answered within 0\.5 s"):
        ask(server, timeout_s=0.5)
    assert time.monotonic() - begun < 15, "each byte came in time, the answer did not"


def test_an_answer_that_drips_is_taken_when_it_ends_in_time(server: Server) -> None:
    server.drip_s = 0.001
    assert ask(server) == "x" * 200


def test_a_forked_child_asks_over_a_connection_of_its_own(server: Server) -> None:
    ask(server)
    child = multiprocessing.get_context("fork").Process(target=ask, args=(server,))
    child.start()
    child.join(60)
    assert (child.exitcode, server.connections) == (0, 2)
