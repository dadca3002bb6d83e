"""A reward service of ten lines of aiohttp over real HTTP, whose answers a test scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from slime.utils.http_utils import close_http_client

Answer = Callable[[dict[str, Any]], Any]


class FakeService:
    """Records each request and answers what `answer` makes of it: JSON, or a response; `statuses` go first."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.delay_s = answer, 0.0
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}  # of `statuses`
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.hosts: list[str] = []
        self.running = self.most_running = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.paths.append(request.path)
        self.hosts.append(request.host)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="bad label", headers=self.headers)
        answer = self.answer(body)
        if isinstance(answer, web.Response):
            return answer
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def and_close() -> Any:
        try:
            return await work
        finally:
            await close_http_client()

    return asyncio.run(and_close())
