"""A proxy that spoils answers: between the real client and a server, every n-th POST goes wrong in one way.

What a fault spoils has reached the server, or has not, as with a real one: `spoils_answer` says which.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.unit.rollout_fakes import serve

SLOW_S = 0.3


@dataclass
class FaultyProxy:
    """Passes everything on; of the POSTs to `path` every `every`-th one meets the fault.

    Attributes:
        upstream: address of the server.
        fault: one of `FAULTS`.
        path: what is spoiled.
        every: 1 spoils each one.
    """

    upstream: str
    fault: str
    path: str
    every: int
    url: str = ""
    asked: int = 0
    spoiled: int = 0
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    @contextmanager
    def serve(self) -> Iterator[FaultyProxy]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.cleanup_ctx.append(self._client)
        with serve(app) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as self._session:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST" or request.path != self.path:
            return await self._pass_on(request)
        self.asked += 1
        if self.asked % self.every:
            return await self._pass_on(request)
        self.spoiled += 1
        return await FAULTS[self.fault](self, request)

    async def _pass_on(self, request: web.Request) -> web.Response:
        assert self._session is not None
        headers = {"Content-Type": request.content_type}
        url, body = self.upstream + request.path_qs, await request.read()
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


Fault = Callable[[FaultyProxy, web.Request], Awaitable[web.StreamResponse]]


async def slow(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(SLOW_S)
    return await proxy._pass_on(request)


async def server_error(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="out of memory")


async def half_an_answer(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    """The server has done the work, and its answer breaks off."""
    whole = await proxy._pass_on(request)
    assert isinstance(whole.body, bytes)
    response = web.StreamResponse(headers={"Content-Length": str(len(whole.body) + 100)})
    await response.prepare(request)
    await response.write(whole.body[: len(whole.body) // 2])
    _hang_up(request)
    return response


async def cut_json(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    whole = await proxy._pass_on(request)
    assert isinstance(whole.body, bytes)
    return web.Response(body=whole.body[: len(whole.body) // 2] + b"{", content_type="application/json")


async def another_json(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    """Well-formed, and nothing that was asked for: of a captive portal, or another service on the port."""
    return web.json_response("service is being upgraded")


async def reset(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    _hang_up(request)
    return web.Response()


async def reset_after_work(proxy: FaultyProxy, request: web.Request) -> web.StreamResponse:
    await proxy._pass_on(request)
    _hang_up(request)
    return web.Response()


def _hang_up(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (slow, server_error, half_an_answer, cut_json, another_json, reset, reset_after_work)
}
