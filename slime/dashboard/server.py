"""The server: who may ask, and how it runs.

Only GET is answered, and only with the token: in the address (which sets a cookie and leaves the address again), in
the cookie, or in an `Authorization: Bearer` header. On the loopback the Host header must name it, so that a page of
somebody else's whose name leads here gets nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime.dashboard.address import is_loopback

COOKIE = "slime_dashboard"  # and the port: cookies of a host are sent to all of its ports
HEADERS = {
    # data: alone for pictures of samples, which the server has found to be pixels.
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Guard:
    """Answers who may not ask, and adds headers to every answer.

    Args:
        app: the application behind it.
        token: opens it.
        host: the host that the server listens on.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app, self._token, self._is_local = app, token, is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered", 405, {"allow": "GET, HEAD"})
        name, port = _host(request.headers.get("host", ""))
        cookie = f"{COOKIE}_{port}"
        if self._is_local and not is_loopback(name):
            return PlainTextResponse("this server is for the loopback host alone", 421)
        given = request.query_params.get("token", "")
        if given and self._is_right(given):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="strict")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and self._is_right(bearer.strip())
        if is_bearer or self._is_right(request.cookies.get(cookie, "")):
            return None
        return PlainTextResponse("open the URL that was printed at the start: it holds the token\n", 401)

    def _is_right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _host(header: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{header}")
        return parts.hostname or "", parts.port or 80
    except ValueError:  # it is no host and port
        return "", 0


def serve(app: ASGIApp, listening: socket.socket, *, token: str, host: str) -> None:
    """Serve an application, guarded, until this process is asked to end.

    Args:
        app: answers those who may ask.
        listening: the socket.
        token, host: see `Guard`.
    """
    with contextlib.suppress(OSError):
        os.nice(10)
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this goes first and not a run
    config = uvicorn.Config(
        Guard(app, token=token, host=host),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=200,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])
