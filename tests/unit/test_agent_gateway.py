"""The gateway with the real `openai` and `anthropic` clients, against a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import random
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import anthropic
import numpy as np
import openai
import pytest

from slime.agent import gateway as gateway_module
from slime.agent.gateway import Budget, Gateway, shared_gateway
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.agent_fakes import FakeTokenizer, finish, gateway, raw

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("bash", "read")
]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("bash", "read")]
CALL = "<tool_call><function=bash><parameter=cmd>ls</parameter></function></tool_call>"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
Status = Sample.Status


def openai_client(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def anthropic_client(server, key):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def opened(server, **kwargs):
    return server.open_session(sampling={"temperature": 1.0}, **kwargs)


def send(server, path, key, body=None, **headers):
    body = {"messages": ASK, "max_tokens": 50} if body is None else body
    status, text = raw(server.url, path, body, Authorization=f"Bearer {key}", **headers)
    return status, json.loads(text)


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_both_protocols_go_on_in_one_session_and_its_tokens_are_the_engines(stream):
    with gateway(["one", "two", "three"]) as (server, engine):
        key = opened(server)
        if stream:
            with openai_client(server, key).chat.completions.stream(model="m", messages=ASK) as events:
                said = events.get_final_completion().choices[0].message.content
        else:
            said = (
                openai_client(server, key).chat.completions.create(model="m", messages=ASK).choices[0].message.content
            )
        history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        arguments = {"model": "m", "max_tokens": 50, "messages": history}
        client = anthropic_client(server, key)
        if stream:
            with client.messages.stream(**arguments) as events:
                said = events.get_final_text()
        else:
            said = client.messages.create(**arguments).content[0].text
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        arguments = {"model": "m", "input": history}
        if stream:
            with openai_client(server, key).responses.stream(**arguments) as events:
                assert events.get_final_response().output_text == "three"
        else:
            assert openai_client(server, key).responses.create(**arguments).output_text == "three"
        [sample] = finish(server, key)
        assert sample.metadata["agent"]["turns"] == 3 and sample.metadata["agent"]["breaks"] == 0
        assert sample.tokens == engine.requests[-1]["input_ids"] + engine.outputs[-1]
        assert sum(sample.loss_mask) == len("onetwothree")
        assert (sample.status, sample.end_reason, sample.reward_is_trusted) == (Status.COMPLETED, "done", True)


def test_a_key_comes_as_bearer_as_x_api_key_or_in_the_url():
    with gateway(["a", "b", "c", "d"]) as (server, _):
        key = opened(server)
        assert raw(server.url, CHAT, {"messages": ASK}, Authorization=f"Bearer {key}")[0] == 200
        assert raw(server.url, MESSAGES, {"messages": ASK}, **{"X-Api-Key": key})[0] == 200
        assert raw(server.url, f"/s/{key}{CHAT}", {"messages": ASK})[0] == 200
        assert raw(server.url, f"/s/{key}{MESSAGES}", {"messages": ASK}, Authorization="Bearer dummy")[0] == 200
        client = openai.OpenAI(base_url=f"{server.url}/s/{key}/v1", api_key="dummy")
        [model] = client.models.list()
        assert model.id == "slime-actor" and client.models.retrieve("slime-actor").id == "slime-actor"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, MESSAGES + "/count_tokens"])
def test_foreign_keys_are_401_and_closed_ones_410(path):
    with gateway([]) as (server, engine):
        assert raw(server.url, path, {"messages": ASK})[0] == 401
        status, answer = send(server, path, "default")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        key = opened(server)
        asyncio.run(server.drop_session(key))
        status, answer = send(server, path, key)
        assert status == 410 and "has ended" in answer["error"]["message"] and key not in str(answer)
        assert server.sessions.store == {} and engine.requests == []


def test_clients_raise_their_own_errors():
    with gateway([]) as (server, _):
        with pytest.raises(openai.AuthenticationError):
            openai_client(server, "x").chat.completions.create(model="m", messages=ASK)
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_client(server, "x").messages.create(model="m", max_tokens=5, messages=ASK)


def test_a_body_over_the_limit_is_413_and_the_next_one_is_answered():
    with gateway(["a"], max_body_bytes=2000) as (server, engine):
        key = opened(server)
        status, answer = send(server, CHAT, key, {"messages": [{"role": "user", "content": "x" * 3000}]})
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        assert "2000 bytes" in answer["error"]["message"] and engine.requests == []
        assert send(server, CHAT, key)[0] == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*ASK, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": "{}"}]}]},
         "messages[0].content[0].input"),
        ({"messages": ASK, "tools": ["x"]}, "tools[0]"),
        ({"messages": ASK, "tools": [{"type": "function", "function": "x"}]}, "tools[0].function"),
        ({"messages": ASK, "functions": []}, "functions"),
        ({"messages": ASK, "temperature": "hot"}, "temperature"),
        ({"messages": ASK, "stop": [3]}, "stop"),
        ({"messages": ASK, "n": 2}, "n"),
        ({"messages": ASK, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": ASK, "tool_choice": "required"}, "tool_choice"),
        ({"messages": ASK, "tool_choice": {"type": "function", "function": {"name": "rm"}}, "tools": TOOLS},
         "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "summary": 3}]}, "input[0].summary"),
        ({"messages": ASK, "tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].name"),
        ({"messages": ASK, "tools": [{"name": "x", "description": {}}]}, "tools[0].description"),
    ],
)  # fmt: skip
def test_wrong_shapes_are_400_and_name_the_field(body, field):
    with gateway([]) as (server, engine):
        key = opened(server)
        status, answer = send(server, RESPONSES if "input" in body else CHAT, key, body)
        assert (status, answer["error"]["param"]) == (400, field), answer
        assert field in answer["error"]["message"] and engine.requests == []
        assert server.sessions.store[key].num_turns == 0


def test_a_full_context_is_the_error_that_each_client_knows_and_a_shorter_request_goes_on():
    prompt = len(FakeTokenizer().apply_chat_template(ASK, None, True, True))
    with gateway(["abc"]) as (server, engine):
        key = opened(server, max_context_tokens=prompt + 3)
        long = [{"role": "user", "content": "hi you"}]
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {prompt + 3} tokens") as caught:
            openai_client(server, key).chat.completions.create(model="m", messages=long)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {prompt + 4} tokens"):
            anthropic_client(server, key).messages.create(model="m", max_tokens=5, messages=long)
        assert server.end_reason(key) == "length" and engine.requests == []
        assert send(server, CHAT, key)[0] == 200 and server.end_reason(key) is None
        assert len(finish(server, key)) == 1


def test_what_the_engine_says_of_its_context_is_said_the_same_way():
    with gateway([]) as (server, engine):
        key = opened(server)
        said = "The input (900 tokens) is longer than the model's context length (512 tokens)."
        engine.failures = [(400, said), (400, "top_p must be in (0, 1]")]
        status, answer = send(server, MESSAGES, key)
        assert status == 400 and answer["error"]["message"] == "prompt is too long: 900 tokens > 512 maximum"
        assert server.end_reason(key) == "length"
        status, answer = send(server, CHAT, key)
        assert status == 400 and "top_p must be" in answer["error"]["message"]


def test_token_counts_are_those_of_the_prompt():
    with gateway(["a"]) as (server, engine):
        key = opened(server)
        arguments = {"model": "m", "messages": ASK, "system": "be brief"}
        count = anthropic_client(server, key).messages.count_tokens(**arguments).input_tokens
        used = anthropic_client(server, key).messages.create(max_tokens=5, **arguments).usage.input_tokens
        assert count == used == len(engine.requests[0]["input_ids"])


def test_a_budget_of_turns_or_tokens_ends_a_session_with_429_that_clients_do_not_repeat():
    with gateway(["abc", "defg"]) as (server, engine):
        key = opened(server, budget=Budget(turns=1))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=5)
        client.chat.completions.create(model="m", messages=ASK)
        assert server.end_reason(key) is None
        started = time.monotonic()
        with pytest.raises(openai.RateLimitError, match="budget of 1 turns"):
            client.chat.completions.create(model="m", messages=[*ASK, *ASK])
        assert time.monotonic() - started < 0.4, "it was not sent again"
        [sample] = finish(server, key)
        assert (sample.status, sample.end_reason) == (Status.TRUNCATED, "max_turns")
        key = opened(server, budget=Budget(tokens=4))
        assert send(server, CHAT, key)[0] == 200
        assert engine.requests[-1]["sampling_params"]["max_new_tokens"] == 4
        status, answer = send(server, MESSAGES, key, {"messages": [*ASK, *ASK]})
        assert status == 429 and "4 generated tokens" in answer["error"]["message"]
        assert [sample.end_reason for sample in finish(server, key)] == ["budget"]


def test_a_budget_of_seconds_ends_the_turn_that_runs():
    with gateway(["abc"], delay_s=1.5) as (server, engine):
        key = opened(server, budget=Budget(seconds=0.3))
        status, answer = send(server, CHAT, key)
        assert status == 429 and "0.3 seconds" in answer["error"]["message"]
        assert engine.aborted == [engine.requests[0]["rid"]] and server.end_reason(key) == "budget"
        assert send(server, CHAT, key)[0] == 429 and len(engine.requests) == 1


def test_the_same_request_in_flight_gets_the_same_answer_and_is_one_turn():
    with gateway([CALL, "b"], delay_s=0.3) as (server, engine), ThreadPoolExecutor(3) as pool:
        key = opened(server, budget=Budget(turns=2))
        body = {"messages": ASK, "tools": TOOLS}
        bodies = [body, {**body, "stream": False}, dict(reversed(body.items()))]
        answers = [future.result()[1] for future in [pool.submit(send, server, CHAT, key, each) for each in bodies]]
        ids = {answer["choices"][0]["message"]["tool_calls"][0]["id"] for answer in answers}
        assert len(ids) == len(engine.requests) == 1
        assert server.sessions.manager.turn_count(key) == 1
        assert text_of(send(server, CHAT, key, body)[1]) == "b", "later it is a branch"
        assert [sample.metadata["agent"]["forks"] for sample in finish(server, key)] == [0, 1]


def test_a_request_that_says_that_it_is_a_repetition_gets_the_answer_that_was_sent():
    with gateway(["a", "b", "c"]) as (server, engine):
        key = opened(server)
        first = send(server, CHAT, key, **{"Idempotency-Key": "x"})
        assert text_of(send(server, CHAT, key, **{"Idempotency-Key": "x"})[1]) == text_of(first[1]) == "a"
        status, answer = send(server, CHAT, key, {"messages": [*ASK, *ASK]}, **{"Idempotency-Key": "x"})
        assert status == 400 and "another request" in answer["error"]["message"]
        assert text_of(send(server, CHAT, key, **{"Idempotency-Key": "y"})[1]) == "b"
        assert text_of(send(server, CHAT, key)[1]) == "c"
        assert text_of(send(server, CHAT, key, **{"X-Stainless-Retry-Count": "1"})[1]) == "c"
        assert len(engine.requests) == server.sessions.manager.turn_count(key) == 3


def test_a_client_that_lost_its_connection_gets_the_answer_when_it_comes_again():
    with gateway(["abc"], delay_s=0.5) as (server, engine):
        key = opened(server)
        with hung_up(server, key):
            until(lambda: engine.requests)
        time.sleep(0.1)
        assert text_of(send(server, CHAT, key, {"messages": ASK})[1]) == "abc"
        assert len(engine.requests) == 1 and engine.aborted == []
        [sample] = finish(server, key)
        assert sample.metadata["agent"]["turns"] == 1


def hung_up(server, key, body=None, attempt=0):
    """A client that sends a request and closes its connection at the end of the block."""
    data = json.dumps(body or {"messages": ASK}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n"
    head += f"X-Stainless-Retry-Count: {attempt}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    client.sendall(head.encode() + data)
    return client


def test_a_turn_whose_client_is_gone_ends_with_its_session_and_with_time(monkeypatch):
    with gateway(["abc", "d"], delay_s=1.5) as (server, engine):
        key = opened(server)
        with hung_up(server, key):
            until(lambda: engine.requests)
        until(lambda: len(server.sessions.inflight[key]) == 1)
        started = time.monotonic()
        assert finish(server, key) == [] and time.monotonic() - started < 2
        until(lambda: engine.aborted)
        monkeypatch.setattr(gateway_module, "_ABANDONED_S", 0.1)
        key = opened(server)
        with hung_up(server, key):
            until(lambda: len(engine.requests) == 2)
        until(lambda: len(engine.aborted) == 2)


def test_a_forced_call_is_a_grammar_and_its_turn_is_context():
    call = '<tool_call>\n{"name":"read", "arguments":{"x": 1}}\n</tool_call>'
    with gateway(["abc", call, "done", "no call"], tool_parser="qwen25") as (server, engine):
        key = opened(server)
        client = openai_client(server, key)
        client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice="auto")
        history = [*ASK, {"role": "assistant", "content": "abc"}, *ASK]
        arguments = {"model": "m", "max_tokens": 99, "messages": history, "tools": ANTHROPIC_TOOLS}
        answer = anthropic_client(server, key).messages.create(
            **arguments, tool_choice={"type": "tool", "name": "read"}
        )
        assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"x": 1})
        assert "ebnf" not in engine.requests[0]["sampling_params"]
        grammar = engine.requests[1]["sampling_params"]["ebnf"]
        assert '\\"read\\"' in grammar and "bash" not in grammar
        named = {"type": "function", "function": {"name": "read"}}
        with pytest.raises(openai.BadRequestError, match="no tool 'rm'"):
            client.chat.completions.create(
                model="m", messages=ASK, tools=TOOLS, tool_choice={**named, "function": {"name": "rm"}}
            )
        samples = finish(server, key)
        assert [sample.loss_mask for sample in samples][0][:3] == [1, 1, 1]
        assert sum(sum(sample.loss_mask) for sample in samples) == 3
        assert sum(sample.metadata["agent"]["masked_tokens"] for sample in samples) == len(call)


def test_a_call_that_cannot_be_forced_is_400_and_an_engine_that_ignores_it_is_503():
    with gateway([], tool_parser="qwen3_coder") as (server, _):
        status, answer = send(
            server, CHAT, opened(server), {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}
        )
        assert status == 400 and "'qwen3_coder' has no JSON form" in answer["error"]["message"]
    with gateway(["no call"], tool_parser="qwen25") as (server, _):
        key = opened(server)
        body = {"messages": ASK, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}
        status, answer = send(server, MESSAGES, key, body)
        assert status == 503 and "not obeyed" in answer["error"]["message"] and finish(server, key) == []
        key = server.open_session(sampling={"regex": "a*"})
        status, answer = send(server, MESSAGES, key, body)
        assert status == 400 and "has a regex already" in answer["error"]["message"]


def test_a_block_without_a_type_in_an_item_that_is_no_message_is_no_failure():
    with gateway(["a"]) as (server, _):
        body = {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "content": [{}]}]}
        assert send(server, RESPONSES, opened(server), body)[0] == 200


def test_what_no_model_gets_is_reported():
    with gateway(["a"]) as (server, _):
        key = opened(server)
        image = {"type": "image", "source": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [image, {"type": "text", "text": "x"}]}
        body = {"messages": [{"role": "user", "content": [result]}], "temperature": 0.1}
        body["tools"] = [*ANTHROPIC_TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
        assert send(server, MESSAGES, key, body)[0] == 200
        [sample] = finish(server, key)
        expected = ["content: image", "temperature", "tools: web_search_20250305"]
        assert sample.metadata["agent"]["ignored_fields"] == expected


def test_an_engine_that_fails_ends_a_session_by_transport_until_it_answers(monkeypatch):
    with gateway(["a", "b"]) as (server, engine):
        key = opened(server)
        assert send(server, CHAT, key)[0] == 200
        engine.failures = [(500, "x")] * 2
        monkeypatch.setattr("slime.utils.http_utils._client.limits.retry_window_s", 0.0)
        status, answer = send(server, CHAT, key, {"messages": [*ASK, *ASK]})
        assert (status, answer["error"]["type"]) == (503, "api_error")
        assert server.end_reason(key) == "transport" and server.sessions.store[key].num_turns == 1
        [sample] = finish(server, key)
        assert (sample.end_reason, sample.reward_is_trusted) == ("transport", False)
        key = opened(server)
        engine.failures = [(500, "x")] * 2
        assert send(server, CHAT, key)[0] == 503 and send(server, CHAT, key)[0] == 200
        assert server.end_reason(key) is None


def test_a_turn_that_the_engine_aborts_goes_on_with_its_tokens_and_is_one_answer():
    is_ending = threading.Event()
    with gateway(["one ", "two"], is_ending=is_ending.is_set, keeps_aborted=True) as (server, engine):
        engine.finishes, engine.meta = ["abort", "stop"], {"weight_version": "7"}
        key = opened(server)
        answers = []
        caller = threading.Thread(
            target=lambda: answers.append(send(server, CHAT, key, {"messages": ASK, "max_tokens": 50}))
        )
        caller.start()
        until(lambda: engine.requests)
        is_ending.set()
        time.sleep(0.5)
        assert len(engine.requests) == 1, "it waits for the end of the abort"
        is_ending.clear()
        caller.join(timeout=10)
        [(status, answer)] = answers
        assert (status, text_of(answer), answer["usage"]["completion_tokens"]) == (200, "one two", 7)
        first, second = engine.requests
        assert second["input_ids"] == first["input_ids"] + engine.outputs[0]
        assert second["sampling_params"]["max_new_tokens"] == 50 - len("one ")
        [sample] = finish(server, key)
        assert sample.tokens == second["input_ids"] + engine.outputs[1]
        assert (sample.loss_mask, sample.weight_versions) == ([1] * 7, ["7", "7"])
        assert sample.rollout_log_probs == [-(i + 1) / 8 for i in (0, 1, 2, 3, 0, 1, 2)]


def test_the_end_of_a_rollout_ends_its_sessions_but_no_evaluation(caplog):
    is_ending = threading.Event()
    with gateway(["a", "b"], is_ending=is_ending.is_set) as (server, _), ThreadPoolExecutor(1) as pool:
        key, evaluation = opened(server), opened(server, evaluation=True)
        assert send(server, CHAT, key)[0] == 200
        is_ending.set()
        status, answer = send(server, CHAT, key, {"messages": [*ASK, *ASK]})
        assert status == 503 and server.end_reason(key) == "aborted"
        asked = pool.submit(send, server, CHAT, evaluation)
        time.sleep(0.1)
        assert not asked.done()
        is_ending.clear()
        assert asked.result()[0] == 200
        [sample] = finish(server, key)
        assert (sample.status, sample.end_reason) == (Status.ABORTED, "aborted")
        with caplog.at_level(logging.INFO):
            [sample] = finish(server, evaluation, reward=0.5)
        assert sample.metadata["agent"]["evaluation"] and "evaluation session: 1 turns, 1 tokens" in caplog.text


def test_a_taken_port_and_a_foreign_address_are_errors_that_name_the_flags():
    with gateway([]) as (server, _):
        for host, port in (("127.0.0.1", server.port), ("192.0.2.1", 0)):
            with pytest.raises(UsageError, match=f"{host}:{port} .--agent-gateway-host, --agent-gateway-port"):
                Gateway(tokenizer=FakeTokenizer(), sglang_url="http://x", host=host, port=port).start()


def test_the_log_of_failed_requests_has_no_keys(caplog):
    with gateway([]) as (server, _), caplog.at_level(logging.INFO, "aiohttp.access"):
        assert raw(server.url, f"/s/secret{CHAT}", {"messages": ASK})[0] == 401
        until(lambda: "401" in caplog.text)
        assert "/s/.../v1/chat/completions: 401" in caplog.text and "secret" not in caplog.text


def test_the_shared_gateway_is_made_of_the_runs_flags(monkeypatch):
    state = types.SimpleNamespace(tokenizer=FakeTokenizer(), aborted=False)
    monkeypatch.setattr(gateway_module, "GenerateState", lambda args: state)
    args = types.SimpleNamespace(
        sglang_router_ip="127.0.0.1", sglang_router_port=1, sglang_tool_call_parser="qwen25",
        sglang_reasoning_parser=None, agent_history="render", agent_gateway_host="127.0.0.2", agent_gateway_port=0,
        partial_rollout=True, use_rollout_routing_replay=False,
    )  # fmt: skip

    async def twice():
        return await shared_gateway(args), await shared_gateway(args)

    try:
        server, same = asyncio.run(twice())
        connection = http.client.HTTPConnection("127.0.0.2", server.port, timeout=5)
        connection.request("GET", "/healthz")
        assert json.loads(connection.getresponse().read()) == {"ok": True, "sessions": 0}
        assert server is same and server.url == f"http://127.0.0.2:{server.port}"
        assert not server.sessions.appends and server.keeps_aborted and not server.is_ending()
        state.aborted = True
        assert server.is_ending()
        server.stop()
    finally:
        gateway_module._Shared.clear_instances()


def test_a_gateway_that_stops_in_a_turn_keeps_the_turns_before_it():
    with gateway(["a", "b"]) as (server, engine), ThreadPoolExecutor(1) as pool:
        key = opened(server)
        assert send(server, CHAT, key)[0] == 200
        engine.delay_s = 1.0
        asked = pool.submit(send, server, CHAT, key, {"messages": [*ASK, {"role": "assistant", "content": "a"}, *ASK]})
        until(lambda: len(engine.requests) == 2)
        server.stop()
        with pytest.raises((OSError, http.client.HTTPException, ValueError)):
            asked.result()
        [sample] = finish(server, key)
        assert (sample.response, sample.metadata["agent"]["turns"]) == ("a", 1) and finish(server, key) == []


def test_agents_that_hang_up_and_come_again_before_an_engine_that_fails_lose_and_double_no_turn():
    dice, num_turns = random.Random(7), 6
    with gateway([f"answer {i}" for i in range(1000)], delay_s=0.02) as (server, engine):

        def agent(key, seed):
            own, messages, stream = random.Random(seed), list(ASK), bool(seed % 2)
            for _ in range(num_turns):
                body = {"messages": messages, "stream": stream}
                for attempt in range(own.randrange(3)):
                    if own.random() < 0.2:
                        engine.failures.append((500, "x"))
                    with hung_up(server, key, body, attempt):
                        time.sleep(own.random() * 0.05)
                answer = send(server, CHAT, key, {"messages": messages}, **{"X-Stainless-Retry-Count": "3"})[1]
                messages = [*messages, {"role": "assistant", "content": text_of(answer)}, *ASK]

        keys = [opened(server, evaluation=dice.random() < 0.5) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(agent, keys, range(8)))
        for key in keys:
            [sample] = finish(server, key)
            agent_of = sample.metadata["agent"]
            assert [agent_of[name] for name in ("turns", "forks", "breaks", "masked_tokens")] == [num_turns, 0, 0, 0]
        assert server.sessions.inflight == {} and server.sessions.store == {}


@pytest.mark.parametrize("history", ["append", "render"])
def test_sub_agents_that_run_at_once_in_a_session_are_branches_of_their_own(history):
    with gateway([f"answer {i}" for i in range(50)], delay_s=0.02, history=history) as (server, _):
        key = opened(server, budget=Budget(turns=12))

        def agent(name):
            messages = [{"role": "system", "content": name}, *ASK]
            client = openai_client(server, key)
            for _ in range(3):
                with client.chat.completions.stream(model="m", messages=messages) as events:
                    said = events.get_final_completion().choices[0].message.content
                messages = [*messages, {"role": "assistant", "content": said}, *ASK]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(agent, "abcd"))
        assert send(server, CHAT, key)[0] == 429
        samples = finish(server, key)
        agents = [sample.metadata["agent"] for sample in samples]
        assert [agent["turns"] for agent in agents] == [3] * 4 and sum(agent["forks"] for agent in agents) == 3
        assert {sample.end_reason for sample in samples} == {"max_turns"}


def test_a_turn_that_is_always_aborted_ends_by_transport():
    with gateway(["a"] * 20, engine_timeout_s=0.5) as (server, engine):
        engine.finish = "abort"
        key = opened(server)
        status, answer = send(server, CHAT, key)
        assert status == 503 and "aborted the turn again and again for 0.5 s" in answer["error"]["message"]
        assert server.end_reason(key) == "transport" and len(engine.requests) <= 5


def test_tokens_before_an_abort_count_in_the_budget_and_the_end_is_a_cut():
    with gateway(["abc", "de"], is_ending=lambda: False) as (server, engine):
        engine.finishes = ["abort", "length"]
        key = opened(server, budget=Budget(tokens=5))
        assert send(server, CHAT, key)[0] == 200
        assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [5, 2]
        assert server.end_reason(key) == "budget"
    with gateway(["abc"]) as (server, engine):
        engine.finishes = ["abort"]
        key = opened(server, budget=Budget(tokens=3))
        status, answer = send(server, CHAT, key)
        assert (status, text_of(answer), answer["choices"][0]["finish_reason"]) == (200, "abc", "length")
        [sample] = finish(server, key)
        assert (sample.status, sample.end_reason) == (Status.TRUNCATED, "budget")


@pytest.mark.parametrize("meta", [{"completion_tokens": 7}, {"completion_tokens": 0}])
def test_an_answer_of_the_engine_that_cannot_be_read_is_a_failure_of_the_engine(meta):
    with gateway(["a", "b"]) as (server, engine):
        key = opened(server)
        assert send(server, CHAT, key)[0] == 200
        engine.meta = meta
        assert send(server, CHAT, key, {"messages": [*ASK, *ASK]})[0] == 503
        [sample] = finish(server, key)
        assert (sample.end_reason, sample.reward_is_trusted) == ("transport", False)


def test_an_engine_is_asked_for_its_experts_where_they_are_replayed():
    for args, asked in ((None, None), (types.SimpleNamespace(use_rollout_routing_replay=True), True)):
        with gateway(["a"], args=args) as (server, engine):
            assert send(server, CHAT, opened(server))[0] == 200
            assert engine.requests[0].get("return_routed_experts") is asked


def test_routed_experts_of_several_turns_are_those_of_every_token_but_the_last():
    layers, topk = 2, 3
    args = types.SimpleNamespace(use_rollout_routing_replay=True, num_layers=layers, moe_router_topk=topk)
    args.sglang_speculative_algorithm = None
    texts, messages = ["a", "bcd", "ef"], list(ASK)
    with gateway(texts, args=args) as (server, engine):
        key = opened(server)
        for number, text in enumerate(list(texts)):
            prompt = engine.tokenizer.apply_chat_template(messages, None, True, True)
            rows = np.full((len(prompt) + len(text) - 1, layers, topk), number, np.int32)
            engine.meta = {"routed_experts": base64.b64encode(rows.tobytes()).decode()}
            assert send(server, CHAT, key, {"messages": messages})[0] == 200
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        [sample] = finish(server, key)
    assert sample.metadata["agent"]["turns"] == 3 and sum(sample.loss_mask) == sum(map(len, ["a", "bcd", "ef"]))
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, layers, topk)
    assert (sample.rollout_routed_experts == 2).all(), "the last call of the engine has read every token"
