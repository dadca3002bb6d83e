"""Streamed generation against a scripted server that breaks off, aborts, refuses or hangs where a test says so.

The server's "model" counts: the token after n tokens is 100 + n, with log-prob -n. So whatever was resumed, a right
response is known from its length alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest
from aiohttp import web

from slime.processes.wait import wait_async
from slime.rollout import sglang_streaming_rollout
from slime.rollout.sampling.engine_request import router_url
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils import async_utils, http_utils
from slime.utils.errors import HttpError
from slime.utils.http.network import Outages
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args, serve

Status = Sample.Status
PROMPT = [ord("p"), ord("q")]


class Server:
    """Each request follows the next line of the script: (tokens to send, what happens then)."""

    def __init__(self, *script: tuple[int, str]) -> None:
        self.script, self.requests = list(script), list[dict[str, Any]]()
        self.versions = ["1"]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        count, then = self.script.pop(0)
        if then.isdigit():
            return web.Response(status=int(then), text="too long")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        start = len(body["input_ids"])
        pairs = [[-float(start + i), 100 + start + i, None] for i in range(count)]
        for i in range(1, count + 1):
            version = self.versions[min(i, len(self.versions)) - 1]
            await self._event(stream, pairs[:i], version, {"type": then} if i == count and _is_end(then) else None)
        if then == "error":
            await stream.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
        if then == "hang":
            await asyncio.sleep(600)
        if then == "break":
            assert request.transport is not None
            request.transport.abort()
        elif then != "end early":
            await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _event(self, stream: web.StreamResponse, pairs: list[Any], version: str, finish: Any) -> None:
        meta = {"output_token_logprobs": pairs, "completion_tokens": len(pairs), "weight_version": version}
        meta |= {"finish_reason": finish, "prompt_tokens": 2, "cached_tokens": 0}
        event = f"data: {json.dumps({'text': 'x' * len(pairs), 'meta_info': meta})}\n\n".encode()
        await stream.write(event[:7])  # in two pieces: a reader must not take a piece for a line
        await stream.write(event[7:])


def _is_end(then: str) -> bool:
    return then in ("stop", "length", "abort")


@pytest.fixture(autouse=True)
def at_once(letters, monkeypatch):
    monkeypatch.setattr(sglang_streaming_rollout, "_FIRST_PAUSE_S", 0.001)


def run(server: Server, sample: Sample | None = None, limit: int = 8, *, call: Any = None) -> Sample:
    sample = sample or Sample(index=0, prompt="pq")
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    with serve(app) as port:
        args = rollout_args(sglang_router_port=port)
        work = (call or generate_streaming)(args, sample, {"max_new_tokens": limit, "temperature": 1.0})
        async_utils.run(work)
    return sample


def assert_counted(sample: Sample, length: int) -> None:
    """The response is the one that the server's model gives, in one go or in pieces."""
    first = len(PROMPT)
    assert sample.tokens == PROMPT + [100 + first + i for i in range(length)]
    assert sample.rollout_log_probs == [-float(first + i) for i in range(length)]
    assert (sample.response_length, sample.loss_mask) == (length, [1] * length)


def test_a_stream_that_ends_gives_the_sample_of_one_call():
    server = Server((5, "stop"))
    sample = run(server)
    assert_counted(sample, 5)
    assert (sample.status, sample.response, sample.weight_versions) == (Status.COMPLETED, "x" * 5, ["1"])
    assert server.requests[0]["stream"] is True and server.requests[0]["return_logprob"] is True


@pytest.mark.parametrize("how", ["break", "end early", "error"])
def test_a_stream_that_breaks_off_goes_on_from_the_tokens_that_came(how):
    server = Server((3, how), (2, "length"))
    server.versions = ["4"]
    sample = run(server, limit=5)
    assert_counted(sample, 5)
    assert sample.status is Status.TRUNCATED
    assert sample.response == "".join(map(chr, sample.tokens[2:])), "decoded as a whole"
    assert server.requests[1]["input_ids"] == sample.tokens[: 2 + 3]
    assert [r["sampling_params"]["max_new_tokens"] for r in server.requests] == [5, 2]
    assert sample.weight_versions == ["4", "4"], "one entry a call"


def test_an_abort_keeps_what_came_and_a_later_call_goes_on():
    server = Server((2, "abort"), (3, "stop"))
    sample = run(server)
    assert sample.status is Status.ABORTED
    assert_counted(sample, 2)
    sample = run(server, sample)
    assert sample.status is Status.COMPLETED
    assert_counted(sample, 5)


def test_a_cancelled_call_keeps_what_came(monkeypatch):
    server = Server((3, "hang"), (1, "stop"))
    came, check = list[Any](), sglang_streaming_rollout._checked
    # What the server has sent is not yet what the call has read.
    monkeypatch.setattr(sglang_streaming_rollout, "_checked", lambda event: came.append(event) or check(event))

    async def three_came() -> bool:
        return len(came) == 3

    async def cancelled(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        task = asyncio.create_task(generate_streaming(args, sample, params))
        await wait_async("three events", 60, three_came, interval_s=0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    sample = run(server, call=cancelled)
    assert sample.status is Status.ABORTED
    assert_counted(sample, 3)
    assert_counted(run(server, sample), 4)


def test_versions_that_change_while_a_response_is_streamed_are_all_noted():
    server = Server((4, "stop"))
    server.versions = ["1", "1", "2"]
    assert run(server).weight_versions == ["1", "2"]


def test_a_response_whose_limit_is_reached_when_the_stream_breaks_is_truncated_without_a_call():
    server = Server((4, "break"))
    sample = run(server, limit=4)
    assert (sample.status, len(server.requests)) == (Status.TRUNCATED, 1)
    assert_counted(sample, 4)


def test_a_request_that_is_refused_is_not_repeated():
    server = Server((0, "400"))
    with pytest.raises(HttpError, match="HTTP 400: too long"):
        run(server)
    assert len(server.requests) == 1


def test_breaks_without_one_new_token_are_given_up():
    server = Server(*[(0, "break")] * 20)
    with pytest.raises(HttpError, match="broke off"):
        run(server)
    assert len(server.requests) == sglang_streaming_rollout._MOST_BREAKS_IN_A_ROW + 1


def test_breaks_that_each_bring_a_token_are_not():
    server = Server(*[(1, "break")] * 12, (1, "stop"))
    assert_counted(run(server, limit=20), 13)


@pytest.mark.parametrize("comes_another", [True, False])
def test_a_stream_that_breaks_with_the_last_engine_waits_for_another(comes_another, monkeypatch):
    """As long as it takes: with the pauses of a server that only stumbles, breaks would be given up."""
    outages, asked = Outages(), list[int]()
    outages.listen(lambda url: outages.begin(url))
    for module in (sglang_streaming_rollout, http_utils):
        monkeypatch.setattr(module, "OUTAGES", outages)
    server = Server((3, "break"), (2, "stop"))

    async def call(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        task = asyncio.create_task(generate_streaming(args, sample, params))
        url = router_url(args)
        while not outages.is_on(url):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        asked.append(len(server.requests))
        outages.end(url) if comes_another else outages.give_up(url, "no more may be started")
        await task

    if comes_another:
        assert_counted(run(server, call=call), 5)
    else:
        with pytest.raises(HttpError, match="no more may be started"):
            run(server, call=call)
    assert asked == [1]


def test_it_is_a_generate_function_of_the_rollout(tmp_path):
    from slime.rollout.sampling.generation import generate_and_rm

    server = Server((3, "break"), (2, "stop"))

    async def call(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        args.custom_generate_function_path = "slime.rollout.sglang_streaming_rollout.generate_streaming"
        GenerateState.clear_instances()
        await generate_and_rm(args, sample, params)

    sample = run(server, call=call)
    assert_counted(sample, 5)
    assert sample.reward == 5.0


@pytest.mark.parametrize(("params", "interval"), [({}, 16), ({"stream_interval": 3}, 3)])
def test_a_response_of_any_length_comes_in_at_most_64_events(params, interval):
    server = Server((5, "stop"))
    call = functools.partial(_with_params, {"max_new_tokens": 1000, "temperature": 1.0, **params})
    run(server, call=call)
    assert server.requests[0]["sampling_params"]["stream_interval"] == interval  # 1000 / 64 = 15.6


async def _with_params(given, args, sample, params):
    return await generate_streaming(args, sample, given)
