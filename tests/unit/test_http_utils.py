"""The HTTP client gives up at once on 4xx, and retries what may pass."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
from aiohttp import web

from slime.utils import async_utils, http_utils
from slime.utils.http_utils import HttpError, get, get_sync, post, post_sync
from tests.unit.rollout_fakes import rollout_args, serve


@pytest.fixture
def server():
    """A server that answers /fail/<status>/<n> with that status n times before it succeeds, and counts connections."""
    calls: list[str] = []
    peers = set()

    async def fail(request):
        calls.append(request.path)
        status, times = int(request.match_info["status"]), int(request.match_info["times"])
        if len(calls) <= times:
            return web.Response(status=status, text="the reason")
        return web.json_response({"calls": len(calls)})

    async def echo(request):
        peers.add(request.transport.get_extra_info("peername"))
        answer = web.json_response({"got": await request.json(), "key": request.headers.get("X-Key")})
        answer.set_cookie("backend", "one")
        calls.append(request.headers.get("Cookie", ""))
        return answer

    async def text(request):
        return web.Response(text="plain")

    async def half(request):
        calls.append(request.path)
        return web.Response(text='{"a": [1,', content_type="application/json")

    async def hang(request):
        calls.append(request.path)
        await asyncio.sleep(20)

    app = web.Application()
    app.router.add_route("*", "/half", half)
    app.router.add_route("*", "/hang", hang)
    app.router.add_route("*", "/fail/{status}/{times}", fail)
    app.router.add_post("/echo", echo)
    app.router.add_get("/text", text)
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}", calls, peers


def test_json_travels_both_ways_numpy_included(server):
    url, _, _ = server
    answer = async_utils.run(post(f"{url}/echo", {"ids": np.arange(3)}, headers={"X-Key": "k"}))
    assert answer == {"got": {"ids": [0, 1, 2]}, "key": "k"}
    assert async_utils.run(get(f"{url}/text")) == "plain"
    assert post_sync(f"{url}/echo", {"a": 1})["got"] == {"a": 1}


def test_a_4xx_answer_fails_at_once_with_its_body(server):
    url, calls, _ = server
    with pytest.raises(HttpError, match="HTTP 404: the reason") as caught:
        async_utils.run(post(f"{url}/fail/404/9", {}))
    assert (len(calls), caught.value.status) == (1, 404)
    with pytest.raises(HttpError, match="HTTP 400: the reason"):
        get_sync(f"{url}/fail/400/9", max_retries=5)
    assert len(calls) == 2


def test_a_5xx_answer_is_retried_until_it_passes(server):
    url, calls, _ = server
    assert async_utils.run(post(f"{url}/fail/503/2", {})) == {"calls": 3}
    calls.clear()
    assert post_sync(f"{url}/fail/500/1", {}, max_retries=3) == {"calls": 2}


def test_retries_end_with_the_last_reason(server):
    url, calls, _ = server
    with pytest.raises(HttpError, match=r"failed 2 times in \d+ s, the last time with HTTP 503: the reason") as caught:
        async_utils.run(post(f"{url}/fail/503/9", {}, max_retries=1))
    assert len(calls) == 2
    assert caught.value.status == 503


def test_half_a_json_is_asked_for_again_blocking_or_not(server):
    url, calls, _ = server
    for ask in (lambda: get_sync(f"{url}/half", max_retries=1), lambda: async_utils.run(get(f"{url}/half", 1))):
        calls.clear()
        with pytest.raises(HttpError, match=r"no complete JSON: '\{\"a\": \[1,'") as caught:
            ask()
        assert (len(calls), caught.value.status) == (2, None)


IN_TIME = {
    "blocking": lambda url: get_sync(url, timeout_s=0.2, max_retries=3),
    "not blocking": lambda url: async_utils.run(post(url, {}, timeout_s=0.2)),
}


@pytest.mark.parametrize("ask", IN_TIME.values(), ids=IN_TIME)
def test_a_request_that_misses_its_deadline_is_not_sent_again(server, ask):
    url, calls, _ = server
    with pytest.raises(HttpError, match=r" \S+/hang was not answered within 0.2 s"):
        ask(f"{url}/hang")
    assert len(calls) <= 1  # none where the deadline passed before the server was scheduled, or the request sent


def test_a_dead_server_is_given_up_after_the_retry_window(monkeypatch):
    monkeypatch.setattr(http_utils.CLIENT.limits, "retry_window_s", 0.3)
    # The second failure comes at least 0.15 s after the first, the third 0.3 s after the second: it is the last.
    with pytest.raises(HttpError, match="POST http://127.0.0.1:9/x failed [23] times .* ClientConnectorError"):
        async_utils.run(post("http://127.0.0.1:9/x", {}))


def test_requests_of_one_loop_share_connections(server):
    url, _, peers = server

    async def several():
        for _ in range(5):
            await post(f"{url}/echo", {})

    async_utils.run(several())
    assert len(peers) == 1


def test_a_balancers_cookie_does_not_tie_requests_to_one_engine(server):
    url, calls, _ = server
    named = url.replace("127.0.0.1", "localhost")  # aiohttp itself takes no cookie of an address in numbers

    async def several():
        for _ in range(3):
            await post(f"{named}/echo", {})

    async_utils.run(several())
    assert calls == [""] * 3


def test_the_client_is_sized_to_the_engines(monkeypatch):
    monkeypatch.setattr(http_utils.CLIENT, "limits", http_utils.HttpLimits())
    http_utils.init_http_client(rollout_args(rollout_num_engines=2))
    assert http_utils.CLIENT.limits.max_connections == 64 * (4 // 2)
    assert http_utils.CLIENT.limits.request_timeout_s == 30.0


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(HttpError("message", status=500)))
    assert (str(error), error.status) == ("message", 500)


def test_engines_are_reached_directly_even_when_a_proxy_is_configured(server, monkeypatch):
    url, _, _ = server
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert post_sync(f"{url}/echo", {"a": 1})["got"] == {"a": 1}
    assert async_utils.run(get(f"{url}/text")) == "plain"
