"""A connection is used again as long as its server keeps it, and opened anew without a word when it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.utils.http_connection import exchange


class Server(ThreadingHTTPServer):
    """Counts its connections; ends one `patience_s` seconds after an answer."""

    connections, patience_s = 0, 60.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
        self.connection.settimeout(self.server.patience_s)  # what uvicorn's timeout_keep_alive does

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(server: Server) -> bytes:
    url = f"http://127.0.0.1:{server.server_port}/"
    return exchange("GET", url, None, {}, connect_s=5, timeout_s=5).body


def test_a_second_request_of_a_thread_goes_over_the_first_ones_connection(server: Server) -> None:
    assert [ask(server), ask(server)] == [b"ok", b"ok"]
    assert server.connections == 1


def test_a_connection_that_the_server_ended_is_opened_anew(server: Server) -> None:
    server.patience_s = 0.05
    ask(server)
    threading.Event().wait(0.5)
    assert ask(server) == b"ok"
    assert server.connections == 2


def test_each_thread_has_a_connection_of_its_own(server: Server) -> None:
    ask(server)
    other = threading.Thread(target=ask, args=(server,))
    other.start()
    other.join(5)
    assert server.connections == 2
