"""Parts of sandbox tests: a server with two keys in place of the gateway, and commands run without a sandbox."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEYS = {"key-of-a": "session a", "key-of-b": "session b"}


class _Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        body = KEYS.get(key, "unknown key").encode()
        self.send_response(200 if key in KEYS else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = f"{KEYS[self.headers['Authorization'].removeprefix('Bearer ')]} sent {length}".encode()
        self.rfile.read(length)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def gateway() -> Iterator[str]:
    """A server that knows two keys and answers with the session of the one that it is given; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def without_sandbox(cmd: str, *, cwd: str, timeout: float = 30) -> tuple[int, str]:
    """Exit code and output of the same command line, run as this user without any protection."""
    done = subprocess.run(["bash", "-c", cmd], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout + done.stderr
