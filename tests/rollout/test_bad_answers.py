"""What an engine may answer instead of a generation, and how each ends: tried again, or one error that names it.

The fake is an aiohttp server that answers with the next of a list of scripted functions, the last one for ever; the
client, the loop and the policies for failing samples are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from slime.processes.wait import wait_async
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.generation import GenerateState, generate_and_rm
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils, http_utils
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args, serve

TOKENS = [100, 101]
META = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-0.5, token, None] for token in TOKENS],
    "completion_tokens": len(TOKENS),
    "weight_version": "1",
}
LONG = "The input (9 tokens) is longer than the model's context length (8 tokens)."


def answers(body, status=200):
    """Answers with this JSON."""

    async def answer(request):
        return web.json_response(body, status=status)

    return answer


def meta(**changes):
    """An answer that is right but for these entries of its meta_info; None leaves an entry out."""
    entries = {key: value for key, value in {**META, **changes}.items() if value is not None}
    return answers({"text": "xx", "meta_info": entries})


good = meta()


async def half_a_json(request):
    text = json.dumps({"text": "xx", "meta_info": META})
    return web.Response(text=text[: len(text) // 2], content_type="application/json")


async def half_a_body(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"text": "x')
    request.transport.close()
    return response


async def closes(request):
    request.transport.close()
    return web.Response()


async def nothing(request):
    await asyncio.sleep(600)
    return web.Response()


class Engine:
    """Router and engine in one, which answers /generate by its script."""

    def __init__(self):
        self.script = [good]
        self.calls = 0

    async def generate(self, request):
        await request.read()
        self.calls += 1
        return await self.script[min(self.calls, len(self.script)) - 1](request)


@pytest.fixture
def engine(letters, monkeypatch):
    """The fake, asked by a client that waits only shortly between two attempts."""
    monkeypatch.setattr(http_utils.CLIENT, "limits", http_utils.HttpLimits(retry_window_s=60.0, max_backoff_s=0.05))
    fake, app = Engine(), web.Application()
    app.router.add_post("/generate", fake.generate)
    with serve(app) as fake.port:
        yield fake
        async_utils.run(http_utils.close_http_client())


def complete(engine, script, **changes):
    """One sample through the default generate function and the reward."""
    engine.script = script
    GenerateState.clear_instances()
    args = rollout_args(sglang_router_port=engine.port, **changes)
    sample = Sample(index=3, group_index=1, prompt="what is it")
    return async_utils.run(generate_and_rm(args, sample, dict(GenerateState(args).sampling_params)))


PASSING = {
    "three server errors": [answers("busy", 500), answers("busy", 503), answers("busy", 502)],
    "half a JSON": [half_a_json],
    "half a body": [half_a_body],
    "a closed connection": [closes, closes],
}


@pytest.mark.parametrize("script", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again_and_nothing_of_it_stays(engine, script):
    sample = complete(engine, [*script, good])
    assert engine.calls == len(script) + 1
    assert (sample.tokens[-2:], sample.response_length, sample.response) == (TOKENS, 2, "xx")
    assert (sample.status, sample.rollout_log_probs, sample.weight_versions) == (
        Sample.Status.COMPLETED,
        [-0.5, -0.5],
        ["1"],
    )


LASTING = {
    "server errors": (answers("out of memory", 500), r'the last time with HTTP 500: "out of memory"'),
    "half a JSON": (half_a_json, r"the last time with an answer that is no complete JSON: '\{\"text\": \"xx\""),
    "half a body": (half_a_body, r"the last time with ClientPayloadError"),
    "closed connections": (closes, r"the last time with ServerDisconnectedError"),
}


@pytest.mark.parametrize(("answer", "message"), LASTING.values(), ids=LASTING)
def test_what_does_not_pass_ends_in_an_error_with_the_last_reason(engine, monkeypatch, answer, message):
    monkeypatch.setattr(http_utils.CLIENT.limits, "retry_window_s", 0.5)
    with pytest.raises(SampleError, match=message) as caught:
        complete(engine, [answer])
    assert engine.calls >= 2, "after its first failure a request is tried again, however late that came"
    assert "the engine's /generate failed on sample 3 (prompt 1: 'what is it'): HttpError: POST" in str(caught.value)
    assert not caught.value.is_final, "with --on-sample-error retry the sample may be generated again"


REFUSALS = {
    "a prompt longer than the context": (answers({"error": {"message": LONG}}, 400), 400, "longer than the model's"),
    "an address that nobody knows": (answers("no route", 404), 404, "no route"),
    "too many requests": (answers("slow down", 429), 429, "slow down"),
}


@pytest.mark.parametrize(("answer", "status", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_final_and_asked_once(engine, answer, status, message):
    with pytest.raises(SampleError, match=rf"was refused: HTTP {status}: .*{message}") as caught:
        complete(engine, [answer, good])
    assert engine.calls == 1
    assert caught.value.is_final
    assert caught.value.__cause__.status == status


def test_an_engine_that_hangs_is_given_up_at_the_deadline(engine):
    begin = time.monotonic()
    with pytest.raises(SampleError, match=r"POST \S+/generate was not answered within 0.3 s"):
        complete(engine, [nothing], sglang_router_request_timeout_secs=0.3)
    assert time.monotonic() - begin >= 0.3
    assert engine.calls <= 1, "asked again, it would be at work twice"  # none where it was not scheduled in time


WRONG = {
    "an error that is called a success": (answers({"error": "oops"}), "'error': 'oops'.*has no meta_info"),
    "a list": (answers([1, 2]), r"answered '\[1, 2\]', which has no meta_info"),
    "a page": (lambda request: text("<html>"), "answered '<html>', which has no meta_info"),
    "no end": (meta(finish_reason=None), "the finish_reason None"),
    "an end that is no dict": (meta(finish_reason="stop"), "the finish_reason 'stop'"),
    "no log-probs": (meta(output_token_logprobs=None), "no output_token_logprobs although"),
    "too few log-probs": (meta(completion_tokens=3), "3 tokens, but log-probs of 2"),
    "too many log-probs": (meta(completion_tokens=1), "1 tokens, but log-probs of 2"),
    "log-probs alone": (meta(output_token_logprobs=[-0.5, -0.5]), r"no \[log-prob, id\]: \[-0.5, -0.5\]"),
    "pairs cut short": (meta(output_token_logprobs=[[-0.5], [-0.5]]), r"no \[log-prob, id\]"),
    "a NaN": (meta(output_token_logprobs=[[-0.5, 1], [None, 2]]), "log-prob of new token 1: a NaN"),
}


async def text(body):
    return web.Response(text=body)


@pytest.mark.parametrize(("answer", "message"), WRONG.values(), ids=WRONG)
def test_an_answer_that_does_not_fit_is_named_with_its_sample(engine, answer, message):
    with pytest.raises(SampleError, match=message) as caught:
        complete(engine, [answer])
    assert "the engine's /generate failed on sample 3" in str(caught.value)


def test_a_prompt_that_fills_our_own_limit_of_the_context_is_truncated_without_a_request(engine):
    sample = complete(engine, [good], rollout_max_context_len=len("what is it"))
    assert engine.calls == 0
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 0)


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_a_refused_prompt_costs_its_group_only(engine, tmp_path, policy):
    async def refuse_long(request):
        body = await request.json()
        return await (answers({"error": LONG}, 400) if len(body["input_ids"]) > 8 else good)(request)

    engine.script = [refuse_long]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in ("a", "longer than 8", "c")))
    GenerateState.clear_instances()
    args = rollout_args(
        sglang_router_port=engine.port, prompt_data=str(path), on_sample_error=policy, over_sampling_batch_size=1
    )
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [group[0].prompt for group in output.samples] == ["a", "c"]
    assert output.metrics["rollout/sample_errors/dropped_groups"] == 1
    assert engine.calls <= 6, "two samples of each of three prompts, none of them twice"


def test_an_abort_gets_through_while_generations_take_every_connection(engine):
    engine.script = [nothing]
    args = rollout_args(sglang_router_port=engine.port, sglang_server_concurrency=2)
    http_utils.init_http_client(args)
    url = f"http://127.0.0.1:{engine.port}"

    async def two_are_there():
        return engine.calls >= 2

    async def all_busy():
        generations = [asyncio.create_task(http_utils.post(f"{url}/generate", {})) for _ in range(4)]
        await wait_async("two generations", 60, two_are_there)
        await asyncio.sleep(0.3)  # for those that must not come
        assert engine.calls == 2, "the client's limit: two of one engine"
        engine.script = [good]
        answer = await http_utils.post(f"{url}/generate", {}, timeout_s=60)
        for generation in generations:
            generation.cancel()
        return answer

    assert async_utils.run(all_busy())["text"] == "xx"
