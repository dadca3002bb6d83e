"""Local sandboxes for other hosts, over HTTP: `SLIME_SANDBOX_KEY=... python -m slime.agent.sandbox_server`.

    PUT    /sandboxes/NAME            {"options", "gateway"?}           make it; the owner chooses the name
    POST   /sandboxes/NAME/exec       {"cmd", "user", "env", "timeout", "request"}
    PUT    /sandboxes/NAME/files?path=...    GET the same               bytes
    POST   /sandboxes/NAME/kill_all   /lease                            nobody asks for a minute: it ends
    DELETE /sandboxes/NAME

Everything but /healthz needs `Authorization: Bearer KEY`. A request with an id ("request") that came before gets the
same answer and is not done again. The server's sandboxes end with it, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slime.agent.sandbox import GatewayAccess, LocalSandbox, SandboxError, SandboxTimeout, make_sandbox
from slime.agent.sandbox.results import FILE_BYTES, OPEN_S, SERVER_KEY_ENV, ExecResult

logger = logging.getLogger(__name__)

COMMAND_BYTES = 1 << 20
LONGEST_S = 7200.0
LEASE_S = 60.0
_OPTIONS = {"workdir": str, "memory_mb": int, "disk_mb": int, "processes": int}
_REMEMBERED = 64
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass
class _Held:
    """A sandbox, when its owner was last heard, and its latest commands by the ids of their requests."""

    opening: asyncio.Task[LocalSandbox]
    heard: float = field(default_factory=time.monotonic)
    commands: dict[str, asyncio.Task[ExecResult]] = field(default_factory=dict)


class BadRequest(ValueError):
    """A request that cannot be done, whatever the state of the server."""


class SandboxServer:
    """The sandboxes of this host.

    Args:
        key: that requests must bear.
        most: sandboxes at a time.
        show: more paths of this host that every sandbox shows.
        lease_s: seconds after which a sandbox ends whose owner is silent.
    """

    def __init__(self, key: str, *, most: int = 64, show: tuple[str, ...] = (), lease_s: float = LEASE_S) -> None:
        self.key, self.most, self.show, self.lease_s = key, most, show, lease_s
        self.held: dict[str, _Held] = {}

    def app(self) -> Starlette:
        """The application."""
        one = "/sandboxes/{name}"
        routes = [
            Route("/healthz", lambda _: JSONResponse({"ok": True, "sandboxes": len(self.held), "most": self.most})),
            Route(one, self._guarded(self._make), methods=["PUT"]),
            Route(one, self._guarded(self._end), methods=["DELETE"]),
            Route(f"{one}/exec", self._guarded(self._exec), methods=["POST"]),
            Route(f"{one}/files", self._guarded(self._write), methods=["PUT"]),
            Route(f"{one}/files", self._guarded(self._read), methods=["GET"]),
            Route(f"{one}/kill_all", self._guarded(self._kill_all), methods=["POST"]),
            Route(f"{one}/lease", self._guarded(self._lease), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._end_silent())
        yield
        watch.cancel()
        await self._close_all(list(self.held))

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 8)
            for name, held in list(self.held.items()):
                if time.monotonic() - held.heard > self.lease_s:
                    logger.warning("sandbox %s ends: its owner was silent for %g s", name, self.lease_s)
                    await self._close_all([name])

    async def _close_all(self, names: list[str]) -> None:
        """End sandboxes; one that cannot be ended is a line of the log, and the watch goes on."""
        try:
            async with asyncio.timeout(2 * OPEN_S):
                failures = await asyncio.gather(*map(self._close, names), return_exceptions=True)
        except TimeoutError:
            logger.error("sandboxes %s were not ended within %g s", ", ".join(names), 2 * OPEN_S)
            return
        for name, failure in zip(names, failures, strict=True):
            if failure is not None:
                logger.error("sandbox %s was not ended: %s: %s", name, type(failure).__name__, failure)

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                return JSONResponse({"error": "the key of this server is needed"}, status_code=401)
            try:
                return await endpoint(request)
            except BadRequest as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            except SandboxTimeout as error:
                return JSONResponse({"error": str(error)}, status_code=408)
            except SandboxError as error:
                return JSONResponse({"error": str(error)}, status_code=422)

        return guarded

    def _of(self, request: Request) -> _Held:
        name = request.path_params["name"]
        if name not in self.held:
            raise SandboxError(f"there is no sandbox {name} (any more)")
        held = self.held[name]
        held.heard = time.monotonic()
        return held

    async def _make(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.held:
            if len(self.held) >= self.most:
                return JSONResponse({"error": f"{self.most} sandboxes are open"}, status_code=503)
            sandbox = self._described(await _json(request))
            if len(self.held) >= self.most or name in self.held:  # meanwhile
                return JSONResponse({"error": f"{self.most} sandboxes are open"}, status_code=503)
            self.held[name] = _Held(asyncio.create_task(sandbox.__aenter__()))
        try:
            await asyncio.shield(self.held[name].opening)
        except SandboxError:
            self.held.pop(name, None)
            raise
        self._of(request)  # The lease begins now, however long it took.
        return JSONResponse({"lease_s": self.lease_s})

    def _described(self, body: dict[str, Any]) -> LocalSandbox:
        options = body.get("options", {})
        if not isinstance(options, dict) or set(options) - set(_OPTIONS):
            raise BadRequest(f"options {options!r:.200}: an object with {', '.join(_OPTIONS)} alone")
        for name, value in options.items():
            if not isinstance(value, _OPTIONS[name]):
                raise BadRequest(f"option {name}={value!r:.100} is no {_OPTIONS[name].__name__}")
        try:
            gateway = GatewayAccess(**body["gateway"]) if body.get("gateway") else None
            return make_sandbox("local", show=self.show, gateway=gateway, **options)  # type: ignore[return-value]
        except (TypeError, ValueError) as error:
            raise BadRequest(str(error)) from None

    async def _exec(self, request: Request) -> Response:
        held, body = self._of(request), await _json(request)
        wanted = {"cmd": str, "user": str, "env": dict, "timeout": int | float, "request": str}
        for name, kind in wanted.items():
            if not isinstance(body.get(name), kind):
                raise BadRequest(f"{name}={body.get(name)!r:.100} of a command has another type than {kind}")
        if not 0 < body["timeout"] <= LONGEST_S:
            raise BadRequest(f"timeout={body['timeout']} of a command: more than 0 and at most {LONGEST_S:g} s")
        sandbox = await asyncio.shield(held.opening)
        if (task := held.commands.get(body["request"])) is None:
            command = sandbox.exec(body["cmd"], user=body["user"], env=body["env"], timeout=body["timeout"])
            task = held.commands[body["request"]] = asyncio.create_task(command)
            while len(held.commands) > _REMEMBERED and next(iter(held.commands.values())).done():
                del held.commands[next(iter(held.commands))]
        try:
            # Shielded: the owner whose connection breaks asks again and finds the command where it is.
            code, stdout, stderr = await asyncio.shield(task)
        except (ValueError, TypeError) as error:
            raise BadRequest(str(error)) from None
        return JSONResponse({"exit": code, "stdout": stdout, "stderr": stderr})

    async def _write(self, request: Request) -> Response:
        sandbox = await asyncio.shield(self._of(request).opening)
        try:
            await sandbox.write_file(_path(request), await _body(request, FILE_BYTES))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return JSONResponse({})

    async def _read(self, request: Request) -> Response:
        sandbox = await asyncio.shield(self._of(request).opening)
        return Response(await sandbox.read_bytes(_path(request)), media_type="application/octet-stream")

    async def _kill_all(self, request: Request) -> Response:
        await (await asyncio.shield(self._of(request).opening)).kill_all()
        return JSONResponse({})

    async def _lease(self, request: Request) -> Response:
        self._of(request)
        return JSONResponse({})

    async def _end(self, request: Request) -> Response:
        await self._close(request.path_params["name"])
        return JSONResponse({})

    async def _close(self, name: str) -> None:
        if held := self.held.pop(name, None):
            await asyncio.wait([held.opening], timeout=OPEN_S)
            if not held.opening.done():
                held.opening.cancel()
            elif not held.opening.exception():
                await held.opening.result().__aexit__(None, None, None)


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path.startswith("/"):
        raise BadRequest(f"path={path!r:.100} of a file: an absolute path is needed")
    return path


async def _body(request: Request, most: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise BadRequest(f"the body is longer than {most} bytes")
    return bytes(data)


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await _body(request, COMMAND_BYTES))
    except ValueError as error:
        raise error if isinstance(error, BadRequest) else BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=18800, help="0: one that is free, which the log names")
    parser.add_argument("--max-sandboxes", type=int, default=64, help="at a time; more are refused with 503")
    parser.add_argument("--show", nargs="*", default=[], help="more paths of this host that sandboxes show read-only")
    args = parser.parse_args()
    key = os.environ.get(SERVER_KEY_ENV, "")
    if len(key) < 16:
        parser.error(
            f"set {SERVER_KEY_ENV} to a key of at least 16 characters: export {SERVER_KEY_ENV}=$(openssl rand -hex 32)"
        )
    if args.max_sandboxes < 1:
        parser.error(f"--max-sandboxes {args.max_sandboxes}: at least 1")
    try:
        LocalSandbox(show=args.show)
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=512)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logger.info("sandbox server on http://%s:%s", *listener.getsockname()[:2])
    app = SandboxServer(key, most=args.max_sandboxes, show=tuple(args.show)).app()
    config = uvicorn.Config(app, log_level="warning", loop="asyncio", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
