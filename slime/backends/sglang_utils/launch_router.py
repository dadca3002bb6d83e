"""Run one router in this process: `python -m slime.backends.sglang_utils.launch_router FILE.json [classify]`.

The file holds the values of `sglang_router`'s own command line, by attribute name, and the environment the API key.
Engines are registered over HTTP (`server_control.register_worker_sync`). SGLang's router 0.3.2 answers /classify with
404, so a model that classifies gets the `Forwarder` in its place: it hands each request, unread, to the engine with
the fewest in flight, and reads host, port and request_timeout_secs of the file.

Wait graph of a request to a `Forwarder`: it waits for one engine, with a deadline; when that cannot be reached it goes
to the next, once to each; the answer, or 502 or 504 with the reason, unblocks the client.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slime.utils.http.api_keys import ROUTER_ENV
from slime.utils.misc import url_host

MAX_BODY_BYTES = 512 * 2**20
CONNECT_TIMEOUT_S = 30.0


@dataclass
class _Engine:
    url: str
    api_key: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    in_flight: int = 0


class Forwarder:
    """Engines, and what is in flight at each.

    Args:
        timeout_s: of one request.
        api_key: that every request must bring; None asks for none.
    """

    def __init__(self, *, timeout_s: float, api_key: str | None = None) -> None:
        @web.middleware
        async def check_key(request: web.Request, handler: Any) -> web.StreamResponse:
            given = request.headers.get("Authorization", "")
            if api_key and not secrets.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                return web.Response(status=401)
            answer: web.StreamResponse = await handler(request)
            return answer

        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[check_key])
        self.app.router.add_get("/workers", self._list)
        self.app.router.add_post("/workers", self._add)
        self.app.router.add_delete("/workers/{id}", self._remove)
        self.app.router.add_post("/{path:.*}", self._forward)
        self.app.cleanup_ctx.append(self._client)
        self._timeout_s = timeout_s
        self._engines: list[_Engine] = []

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        # Below uvicorn's keep-alive of 5 s: a connection that the engine is about to close is never reused.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def _list(self, _: web.Request) -> web.Response:
        entries = [{"id": engine.id, "url": engine.url, "is_healthy": True} for engine in self._engines]
        return web.json_response({"workers": entries})

    async def _add(self, request: web.Request) -> web.Response:
        asked = await request.json()
        engine = _Engine(asked["url"].rstrip("/"), asked.get("api_key"))
        if engine.url not in [known.url for known in self._engines]:
            self._engines.append(engine)
        return web.json_response({"status": "accepted"}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        self._engines = [engine for engine in self._engines if engine.id != request.match_info["id"]]
        return web.json_response({"status": "accepted"}, status=202)

    async def _forward(self, request: web.Request) -> web.Response:
        body, problem = await request.read(), "no engine is registered"
        for engine in sorted(self._engines, key=lambda one: one.in_flight):
            try:
                return await self._send(engine, request.path_qs, body)
            except TimeoutError:
                return web.Response(status=504, text=f"{engine.url} did not answer within {self._timeout_s:g} s")
            except aiohttp.ClientError as error:
                problem = f"{engine.url} cannot be reached: {error}"
        return web.Response(status=502, text=problem)

    async def _send(self, engine: _Engine, path: str, body: bytes) -> web.Response:
        engine.in_flight += 1
        try:
            headers = {"Content-Type": "application/json"}
            if engine.api_key:
                headers["Authorization"] = f"Bearer {engine.api_key}"
            async with self._session.post(engine.url + path, data=body, headers=headers) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type or None
                )
        finally:
            engine.in_flight -= 1


def main(path: Path, *, classifies: bool = False) -> None:
    """Route until told to stop."""
    values, api_key = json.loads(path.read_text()), os.environ.get(ROUTER_ENV)
    if classifies:
        forwarder = Forwarder(timeout_s=float(values["request_timeout_secs"]), api_key=api_key)
        web.run_app(forwarder.app, host=values["host"], port=values["port"], print=None, access_log=None)
        return
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    # It joins this host and its port as text; that of the metrics it parses.
    values |= {"api_key": api_key, "host": url_host(values["host"])}
    launch_router(RouterArgs.from_cli_args(argparse.Namespace(**values)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), classifies="classify" in sys.argv[2:])
