"""The router of models that classify: over real HTTP, with fake engines behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.launch_router import Forwarder
from slime.backends.sglang_utils.server_control import Worker
from slime.utils import http_utils
from slime.utils.errors import HttpError
from tests.unit.rollout_fakes import serve


class FakeEngine:
    """Answers /classify after `delay_s`; counts what it was asked."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.bodies: list[Any] = []
        self.app = web.Application()
        self.app.router.add_post("/classify", self.classify)

    async def classify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.delay_s)
        if not body.get("input_ids"):
            return web.json_response({"error": "no input"}, status=400)
        return web.json_response({"embedding": [float(len(body["input_ids"]))]})


@pytest.fixture
def router() -> Any:
    with serve(Forwarder(timeout_s=60.0).app) as port:
        yield f"http://127.0.0.1:{port}"


async def _all(url: str, payloads: list[dict[str, Any]]) -> list[Any]:
    try:
        return await asyncio.gather(*(http_utils.post(url, payload, max_retries=0) for payload in payloads))
    finally:
        await http_utils.close_http_client()


def ask(url: str, *payloads: dict[str, Any]) -> list[Any]:
    return asyncio.run(_all(url, list(payloads)))


def test_requests_go_to_the_engine_that_has_least_to_do(router: str) -> None:
    slow, fast = FakeEngine(delay_s=2.0), FakeEngine()
    with serve(slow.app) as first, serve(fast.app) as second:
        for port in (first, second):
            server_control.register_worker_sync(router, Worker(f"http://127.0.0.1:{port}"), deadline_s=60)
        assert len(server_control.list_workers_sync(router)) == 2
        answers = ask(f"{router}/classify", *({"input_ids": [1] * n} for n in range(1, 5)))
        assert [answer["embedding"] for answer in answers] == [[1.0], [2.0], [3.0], [4.0]]
        assert len(slow.bodies) <= 2 and len(slow.bodies) + len(fast.bodies) == 4
        server_control.remove_worker_sync(router, f"http://127.0.0.1:{first}")
        assert server_control.list_workers_sync(router) == [f"http://127.0.0.1:{second}"]


def test_an_engines_refusal_is_passed_on(router: str) -> None:
    with serve(FakeEngine().app) as port:
        server_control.register_worker_sync(router, Worker(f"http://127.0.0.1:{port}"), deadline_s=60)
        with pytest.raises(HttpError, match="no input") as raised:
            ask(f"{router}/classify", {})
    assert raised.value.status == 400


def test_a_dead_engine_is_passed_over(router: str) -> None:
    with pytest.raises(HttpError, match="no engine is registered"):
        ask(f"{router}/classify", {"input_ids": [1]})
    server_control.register_worker_sync(router, Worker("http://127.0.0.1:1"), deadline_s=60)
    with pytest.raises(HttpError, match="http://127.0.0.1:1 cannot be reached"):
        ask(f"{router}/classify", {"input_ids": [1]})
    with serve(FakeEngine().app) as port:
        server_control.register_worker_sync(router, Worker(f"http://127.0.0.1:{port}"), deadline_s=60)
        assert ask(f"{router}/classify", {"input_ids": [1]}) == [{"embedding": [1.0]}]


def test_a_silent_engine_is_given_up() -> None:
    with serve(Forwarder(timeout_s=1.0).app) as forwarder, serve(FakeEngine(delay_s=600).app) as engine:
        router = f"http://127.0.0.1:{forwarder}"
        server_control.register_worker_sync(router, Worker(f"http://127.0.0.1:{engine}"), deadline_s=60)
        with pytest.raises(HttpError, match=f":{engine} did not answer within 1 s") as raised:
            ask(f"{router}/classify", {"input_ids": [1]})
        assert raised.value.status == 504
