"""The one server that a sandbox reaches: the gateway, under the key of the sandbox's own session.

The sandbox has no network. A socket that listens on *its* loopback is answered here, outside: each request is passed
on to the gateway if it bears the session's key, and refused otherwise. Nothing inside names the gateway's address.
"""

from __future__ import annotations

import hmac
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from yarl import URL

BODY_BYTES = 64 << 20
PORT = 8000
TURN_S = 3600.0  # the longest turn of a model
# They belong to one connection (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_CREDENTIALS = {"authorization", "x-api-key"}  # never a client's: the door writes them itself


@dataclass(frozen=True)
class GatewayAccess:
    """What a sandbox may reach.

    Attributes:
        url: of the gateway, as this host reaches it.
        key: of the session.
        port: on the sandbox's loopback, so `http://127.0.0.1:8000` is the address for programs inside.
    """

    url: str
    key: str
    port: int = PORT

    @property
    def inside_url(self) -> str:
        """The gateway's address for programs in the sandbox."""
        return f"http://127.0.0.1:{self.port}"


class GatewayDoor:
    """Answers on a sandbox's loopback.

    Args:
        access: what it passes on to.
        listener: listens in the sandbox's network.
    """

    def __init__(self, access: GatewayAccess, listener: socket.socket) -> None:
        self.access, self.listener = access, listener
        self._client: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Begin to answer."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._client = ClientSession(timeout=ClientTimeout(total=TURN_S, sock_connect=10), auto_decompress=False)
        # Cancelled handlers: a client that was killed ends its request at the gateway, too.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, self.listener).start()

    async def close(self) -> None:
        """Stop answering."""
        if self._runner:
            await self._runner.cleanup()
        if self._client:
            await self._client.close()
        self.listener.close()

    def _has_key(self, request: web.Request) -> bool:
        bearers = [value.removeprefix("Bearer ").strip() for value in request.headers.getall("Authorization", [])]
        given = [*bearers, *request.headers.getall("x-api-key", [])]
        own = self.access.key.encode()
        return bool(given) and all(hmac.compare_digest(key.encode(errors="surrogateescape"), own) for key in given)

    def target(self, raw_path: str) -> URL | None:
        """The gateway's address of a path; None for one that could lead elsewhere."""
        path = unquote(raw_path.partition("?")[0]).replace("\\", "/")
        parts = path.split("/")
        if not path.startswith("/") or path.startswith("//") or ".." in parts:
            return None
        if parts[1] == "s" and parts[2:3] != [self.access.key]:  # the gateway takes a key from there, too
            return None
        try:
            base = URL(self.access.url.rstrip("/"), encoded=True)
            url = URL(str(base) + raw_path, encoded=True)
            return url if url.origin() == base.origin() else None
        except ValueError:
            return None

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if not self._has_key(request):
            return _error(401, "authentication_error", "this sandbox may use the key of its own session only")
        assert self._client is not None
        if (url := self.target(request.raw_path)) is None:
            return _error(
                400,
                "invalid_request_error",
                "the address must be a path of the gateway, without '..' or a key of others",
            )
        dropped = _HOP_BY_HOP | _CREDENTIALS
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        headers |= {"Authorization": f"Bearer {self.access.key}", "x-api-key": self.access.key}
        body = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response
        except ClientError as error:
            if response is not None:  # a part of the answer has gone out: only a cut says that it is not whole
                if request.transport is not None:
                    request.transport.abort()
                return response
            return _error(502, "api_error", f"the gateway does not answer: {type(error).__name__}")


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)
