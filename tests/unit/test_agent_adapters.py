"""Both protocols against a scripted engine, with the real `openai` and `anthropic` clients where they serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import urllib.request

import anthropic
import openai
import pytest

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter, common, sessions
from slime.agent.adapters.session import Answer, Reply, Session, _turn_of, sampling_params
from slime.agent.adapters.wire import BadRequest
from slime.agent.history import Prompt
from slime.agent.trajectory import TurnRecord
from slime.utils.errors import HttpError, UsageError
from slime.utils.types import Sample
from tests.unit.agent_fakes import FakeTokenizer, finish, raw, serving

BASE = Sample(index=0)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("bash", "read")
]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("bash", "read")]
CALL = "<tool_call><function=bash><parameter=cmd>ls</parameter></function></tool_call>"
READ = "<tool_call><function=read><parameter=path>a</parameter></function></tool_call>"
ASK = [{"role": "user", "content": "hi"}]
KINDS = {"openai": OpenAIAdapter, "anthropic": AnthropicAdapter}


def openai_client(url, key="s"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def anthropic_client(url, key="s"):
    return anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0)


def chat(client, messages=ASK, **kwargs):
    return client.chat.completions.create(model="m", messages=messages, **kwargs)


def test_a_plain_answer_is_what_both_protocols_say_and_its_tokens_are_the_engines():
    with serving(OpenAIAdapter, ["hello"]) as (adapter, url, engine):
        adapter.open_session("s")
        status, text = raw(url, "/v1/chat/completions", {"messages": ASK, "max_tokens": 7}, Authorization="Bearer s")
        body = json.loads(text)
        assert (status, body["object"], body["id"][:9], body["model"]) == (
            200,
            "chat.completion",
            "chatcmpl_",
            "slime-actor",
        )
        message = {"role": "assistant", "content": "hello"}
        assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]
        [sent] = engine.requests
        n = len(sent["input_ids"])
        assert body["usage"] == {"prompt_tokens": n, "completion_tokens": 5, "total_tokens": n + 5}
        assert sent["sampling_params"]["max_new_tokens"] == 7 and sent["return_logprob"] is True
        assert engine.headers[0]["X-SMG-Routing-Key"] == "s"
        [sample] = finish(adapter, reward=2.0, extra_metadata={"exit": 0})
        assert sample.tokens == sent["input_ids"] + engine.outputs[0]
        assert (sample.loss_mask, sample.response, sample.reward) == ([1] * 5, "hello", 2.0)
        assert sample.rollout_log_probs == [-(i + 1) / 8 for i in range(5)]
        assert sample.metadata["exit"] == 0 and finish(adapter) == []
    with serving(AnthropicAdapter, ["hello"]) as (adapter, url, engine):
        answer = anthropic_client(url).messages.create(model="m", max_tokens=4, messages=ASK)
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "hello"}]
        assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("end_turn", None, 5)
        assert answer.id.startswith("msg_") and engine.requests[0]["sampling_params"]["max_new_tokens"] == 4
        [sample] = finish(adapter)
        assert sample.response == "hello"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_openai_client_makes_parallel_calls_and_goes_on_in_one_sample(stream):
    with serving(OpenAIAdapter, [f"Look.{CALL}\n{READ}", "done"]) as (adapter, url, engine):
        client = openai_client(url)
        if stream:
            with client.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as events:
                answer = events.get_final_completion()
        else:
            answer = chat(client, tools=TOOLS)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look.")
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
        assert calls == [("bash", {"cmd": "ls"}), ("read", {"path": "a"})]
        history = [*ASK, choice.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in choice.message.tool_calls]
        assert chat(client, history, tools=TOOLS).choices[0].message.content == "done"
        until(lambda: adapter.manager.turn_count("s") == 2)  # recorded once the client has the answer
        tree = adapter.manager.trees["s"]
        assert [len(node.children) for node in next(tree.leaves()).path_from_root()] == [1, 1, 1, 1, 0]
        assert finish(adapter)[0].metadata["use_tool"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_anthropic_client_makes_calls_and_goes_on_in_one_session(stream):
    with serving(AnthropicAdapter, [f"Look.\n{CALL}", "done"]) as (adapter, url, engine):
        client = anthropic_client(url)
        arguments = {"model": "m", "max_tokens": 99, "tools": ANTHROPIC_TOOLS}
        if stream:
            with client.messages.stream(messages=ASK, **arguments) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=ASK, **arguments)
        text, use = answer.content
        assert (text.text, use.name, use.input, answer.stop_reason) == ("Look.", "bash", {"cmd": "ls"}, "tool_use")
        assert use.id.startswith("toolu_") and len(use.id) == len("toolu_") + 16
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "a.py"}
        replay = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        client.messages.create(messages=replay, **arguments)
        first, second = (request["input_ids"] for request in engine.requests)
        assert second[: len(first)] == first, "the second prompt goes on from the first"
        samples = finish(adapter)
        assert all(len(s.loss_mask) == s.response_length == len(s.rollout_log_probs) for s in samples)
        assert any(any(s.loss_mask) for s in samples)


def test_streams_have_the_events_of_their_protocols():
    with serving(OpenAIAdapter, ["hello"]) as (_, url, _engine):
        _, text = raw(url, "/v1/chat/completions", {"messages": ASK, "stream": True})
        *chunks, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert [c["delta"] for c in choices] == [{"role": "assistant"}, {"content": "hello"}, {}]
        assert (choices[-1]["finish_reason"], done) == ("stop", "[DONE]")
    with serving(AnthropicAdapter, ["hello"]) as (_, url, _engine):
        _, text = raw(url, "/v1/messages", {"messages": ASK, "max_tokens": 9}, Accept="text/event-stream")
        names, datas = zip(*(event.split("\n") for event in text.strip().split("\n\n")), strict=True)
        events = [json.loads(data.removeprefix("data: ")) for data in datas]
        assert [name.removeprefix("event: ") for name in names] == [event["type"] for event in events]
        kinds = ["message_start", "content_block_start", "content_block_delta", "content_block_stop"]
        assert [event["type"] for event in events] == [*kinds, "message_delta", "message_stop"]
        assert events[2]["delta"] == {"type": "text_delta", "text": "hello"}


def test_the_runs_sampling_wins_and_what_is_ignored_is_said(caplog):
    session = Session({"temperature": 1.0, "max_new_tokens": 50, "stop": ["END"]})
    keys = {"max_token_keys": ("max_completion_tokens", "max_tokens"), "stop_keys": ("stop",)}
    body = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 80, "stop": "X", "seed": 3, "tool_choice": "auto"}
    params = sampling_params(session, body, **keys)
    assert (params["temperature"], params["top_p"], params["max_new_tokens"]) == (1.0, 0.9, 50)
    assert params["stop"] == ["END", "X"]
    assert (params["skip_special_tokens"], params["no_stop_trim"]) == (False, True)
    assert session.ignored == {"temperature": 1, "seed": 1}
    assert sampling_params(Session(), {"temperature": 0.2}, **keys)["temperature"] == 0.2
    with serving(OpenAIAdapter, ["a", "b"]) as (adapter, url, _), caplog.at_level(logging.WARNING):
        adapter.open_session("s", sampling_defaults={"temperature": 1.0})
        client = openai_client(url)
        chat(client, temperature=0.5)
        chat(client, temperature=0.5)
        assert caplog.text.count("'temperature' of a request has no effect") == 1
        assert finish(adapter)[0].metadata["agent"]["ignored_fields"] == ["temperature"]


def test_a_full_context_ends_a_turn_without_a_call_of_the_engine():
    with serving(OpenAIAdapter, ["hello"]) as (adapter, url, engine):
        prompt = len(FakeTokenizer().apply_chat_template(ASK, None, True, True))
        adapter.open_session("s", max_context_tokens=prompt + 3)
        chat(openai_client(url))
        assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 3
        adapter.open_session("full", max_context_tokens=prompt)
        answer = chat(openai_client(url, "full"))
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "")
        assert len(engine.requests) == 1 and finish(adapter, "full") == []
        [sample] = finish(adapter)
        assert len(sample.tokens) == prompt + 3, "what an engine wrote beyond the context is cut"


def test_the_turn_cap_is_429_and_counts_before_the_engine():
    with serving(AnthropicAdapter, ["a"], max_turns_per_sid=1) as (adapter, url, engine):
        body = {"messages": ASK, "max_tokens": 4}
        assert raw(url, "/v1/messages", body)[0] == 200
        status, text = raw(url, "/v1/messages", body)
        assert (status, json.loads(text)["error"]["type"]) == (429, "rate_limit_error")
        assert len(engine.requests) == 1


def test_a_closed_session_is_503_until_it_is_opened_again():
    with serving(OpenAIAdapter, ["a", "b"]) as (adapter, url, _):
        adapter.open_session("s")
        with pytest.raises(ValueError, match="open already"):
            adapter.open_session("s")
        chat(openai_client(url))
        asyncio.run(adapter.drop_session("s"))
        assert not adapter.manager.has_session("s")
        with pytest.raises(openai.InternalServerError, match="session closed"):
            chat(openai_client(url))
        adapter.open_session("s")
        assert chat(openai_client(url)).choices[0].message.content == "b"
        assert len(finish(adapter)) == 1


def test_a_session_without_a_name_gets_a_key_that_nobody_guesses():
    adapter = OpenAIAdapter(tokenizer=FakeTokenizer(), sglang_url="http://x")
    keys = {adapter.open_session() for _ in range(3)}
    assert len(keys) == 3 and min(map(len, keys)) >= 40


def test_idle_sessions_that_nobody_opened_are_forgotten(monkeypatch):
    with serving(OpenAIAdapter, ["a", "b", "c"]) as (adapter, url, _):
        adapter.open_session("kept")
        chat(openai_client(url, "kept"))
        chat(openai_client(url, "idle"))
        monkeypatch.setattr(sessions, "IDLE_SESSION_S", -1.0)
        chat(openai_client(url, "new"))
        assert set(adapter.store) == {"kept", "new"} and not adapter.manager.has_session("idle")


def test_closed_keys_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_CLOSED", 2)
    adapter = OpenAIAdapter(tokenizer=FakeTokenizer(), sglang_url="http://x")
    for sid in "abc":
        asyncio.run(adapter.drop_session(sid))
    assert adapter.closed == {"b", "c"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"[]", "must be a JSON object"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": []}, "there is none"),
        ({"messages": ASK, "n": 2}, "n 2"),
        ({"messages": ASK, "max_tokens": "many"}, "'many' is no positive number"),
    ],
)
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_bad_bodies_are_400_and_say_why(kind, body, message):
    path = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}[kind]
    with serving(KINDS[kind], ["a"]) as (_, url, engine):
        status, text = raw(url, path, body)
        assert status == 400 and message in json.loads(text)["error"]["message"]
        assert not engine.requests


def test_a_refusal_of_the_engine_is_500_and_a_lost_one_is_tried_again():
    with serving(OpenAIAdapter, ["a", "b"]) as (adapter, url, engine):
        engine.failures = [(400, "input too long")]
        with pytest.raises(openai.InternalServerError, match="input too long"):
            chat(openai_client(url))
        engine.failures = [(503, "no worker")]
        assert chat(openai_client(url)).choices[0].message.content == "a"
        assert len(engine.requests) == 3 and engine.aborted == []
        assert len(finish(adapter)) == 1


def test_an_engine_that_is_late_is_aborted():
    with serving(OpenAIAdapter, ["a"], delay_s=2.0, engine_timeout_s=0.2) as (_, url, engine):
        with pytest.raises(openai.InternalServerError, match=r"did not answer within 0\.2 s"):
            chat(openai_client(url))
        assert engine.aborted == [engine.requests[0]["rid"]]


def test_a_client_that_hangs_up_aborts_its_turn_and_nothing_is_recorded():
    with serving(OpenAIAdapter, ["a"], delay_s=2.0, runner={"handler_cancellation": True}) as (adapter, url, engine):
        port = int(url.rpartition(":")[2])
        body = json.dumps({"messages": ASK}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            until(lambda: engine.requests)
        until(lambda: engine.aborted)
        until(lambda: not adapter.inflight)
        assert engine.aborted == [engine.requests[0]["rid"]] and finish(adapter, "default") == []


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stream_shows_signs_of_life_while_the_engine_works():
    with serving(OpenAIAdapter, ["a"], delay_s=0.4, ping_interval_s=0.1) as (_, url, _engine):
        _, text = raw(url, "/v1/chat/completions", {"messages": ASK, "stream": True})
        assert text.startswith(": ping\n\n") and text.endswith("data: [DONE]\n\n")
        assert text.count(": ping") in (2, 3, 4)
    with (
        serving(AnthropicAdapter, ["hello"], delay_s=0.3, ping_interval_s=0.1) as (_, url, _engine),
        anthropic_client(url).messages.stream(model="m", max_tokens=9, messages=ASK) as stream,
    ):
        assert stream.get_final_text() == "hello"


def test_a_failure_after_a_ping_is_an_event_that_clients_raise():
    with serving(OpenAIAdapter, [], delay_s=0.3, ping_interval_s=0.1) as (_, url, engine):
        engine.failures = [(400, "too long")]
        with pytest.raises(openai.APIError, match="too long"):
            list(chat(openai_client(url), stream=True))


def test_a_bad_request_after_a_ping_is_an_event_and_no_second_head():
    class Picky(OpenAIAdapter):
        async def make_prompt(self, session, messages, tools):
            await asyncio.sleep(0.3)
            raise BadRequest("not these messages")

    with serving(Picky, [], ping_interval_s=0.1) as (_, url, _engine):
        status, text = raw(url, "/v1/chat/completions", {"messages": ASK, "stream": True})
        assert status == 200 and text.count("not these messages") == 1 and "HTTP/1.1" not in text
        assert '"type":"invalid_request_error"' in text


def test_a_turn_of_a_session_that_was_finished_meanwhile_is_not_recorded():
    adapter = OpenAIAdapter(tokenizer=FakeTokenizer(), sglang_url="http://127.0.0.1:9")
    adapter.open_session("s")
    old, turn = adapter.store["s"], TurnRecord([1], [2], "stop", [-0.5])
    prompt, reply = Prompt([1], ASK), Reply({"role": "assistant", "content": "a"}, "stop", None)
    asyncio.run(adapter.drop_session("s"))
    adapter.open_session("s")
    assert not adapter.sessions.record("s", old, Answer(prompt, None, turn, reply))
    assert finish(adapter) == []
    adapter.open_session("s")
    assert adapter.sessions.record("s", adapter.store["s"], Answer(prompt, None, turn, reply))
    assert len(finish(adapter)) == 1


def test_the_engines_routing_is_left_out_of_a_turn():
    meta = {"output_token_logprobs": [[-0.5, 7, None]], "routed_experts": "AAAA", "weight_version": "3"}
    turn = _turn_of([1], {"meta_info": meta})
    assert turn.output_ids == [7] and turn.meta_info == {"weight_version": "3"}


def test_finishing_waits_for_a_running_turn_and_then_cancels_it():
    def post(url):
        return asyncio.get_running_loop().run_in_executor(None, raw, url, "/v1/chat/completions", {"messages": ASK})

    async def finish_while_running(adapter, url, engine, wait_s):
        running = post(url)
        while not engine.requests:
            await asyncio.sleep(0.01)
        samples = await adapter.finish_session("default", base_sample=BASE, wait_timeout=wait_s)
        with contextlib.suppress(OSError):
            await running
        return samples

    with serving(OpenAIAdapter, ["a"], delay_s=0.5) as (adapter, url, engine):
        assert len(asyncio.run(finish_while_running(adapter, url, engine, 5.0))) == 1
    with serving(OpenAIAdapter, ["a"], delay_s=3.0) as (adapter, url, engine):
        assert asyncio.run(finish_while_running(adapter, url, engine, 0.1)) == []
        assert engine.aborted == [engine.requests[0]["rid"]]


def test_tokens_are_counted_as_the_engine_would_get_them():
    with serving(AnthropicAdapter, ["a"]) as (_, url, engine):
        client = anthropic_client(url)
        counted = client.messages.count_tokens(model="m", messages=ASK, system="be brief").input_tokens
        assert not engine.requests
        used = client.messages.create(model="m", max_tokens=4, messages=ASK, system="be brief").usage.input_tokens
        assert counted == used == len(engine.requests[0]["input_ids"])


def test_tool_choice_none_leaves_calls_in_the_text():
    with serving(OpenAIAdapter, [CALL]) as (_, url, _engine):
        message = chat(openai_client(url), tools=TOOLS, tool_choice="none").choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)


def test_a_malformed_call_reaches_client_and_sample():
    broken = "<tool_call><function=bash><parameter=cmd>ls"
    with serving(OpenAIAdapter, [broken]) as (adapter, url, _):
        assert chat(openai_client(url), tools=TOOLS).choices[0].message.content == broken
        assert finish(adapter)[0].metadata["ill_formed"]


def test_the_engine_call_can_be_replaced_and_the_callback_sees_each_turn(monkeypatch, caplog):
    async def scripted(prompt_ids, session, body, *, adapter, session_id=None):
        return common.TurnRecord(prompt_ids, [72, 105], "stop")

    seen = []

    def callback(*args):
        seen.append(args)
        raise KeyError("of the user")

    monkeypatch.setattr(common, "call_sglang_generate", scripted)
    with serving(OpenAIAdapter, [], debug_callback=callback) as (adapter, url, engine):
        assert chat(openai_client(url)).choices[0].message.content == "Hi"
        until(lambda: seen)
        sid, messages, tools, answer, turn = seen[0]
        assert (sid, messages, tools, answer["content"], turn.output_ids) == ("s", ASK, None, "Hi", [72, 105])
        assert finish(adapter)[0].rollout_log_probs == [0.0, 0.0] and not engine.requests
    assert "of the user" in caplog.text


def test_health_is_ok_and_an_unknown_history_is_refused():
    with (
        serving(OpenAIAdapter, []) as (_, url, _engine),
        urllib.request.urlopen(url + "/healthz", timeout=5) as answer,
    ):
        assert json.loads(answer.read())["ok"] is True
    with pytest.raises(UsageError, match="history 'both' is unknown; it is one of append, render"):
        OpenAIAdapter(tokenizer=FakeTokenizer(), sglang_url="http://x", history="both")
    assert issubclass(OpenAIAdapter, BaseAdapter) and issubclass(HttpError, RuntimeError)
