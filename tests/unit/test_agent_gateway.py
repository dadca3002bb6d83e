"""The gateway with the real `openai` and `anthropic` clients, against a scripted engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import types
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from slime.agent import gateway as gateway_module
from slime.agent.gateway import Gateway, shared_gateway
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.agent_fakes import (
    ANTHROPIC_TOOLS,
    ASK,
    CHAT,
    MESSAGES,
    RESPONSES,
    TOOLS,
    FakeTokenizer,
    anthropic_client,
    finish,
    gateway,
    hung_up,
    openai_client,
    opened,
    raw,
    send,
    until,
)
from tests.unit.test_image_prompts import Processor

Status = Sample.Status


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


def test_nothing_is_left_of_sessions_that_their_agents_have_abandoned():
    with gateway(["x"] * 60) as (server, engine):
        keys = [opened(server) for _ in range(1000)]
        for number, key in enumerate(keys[:60]):
            if number % 2:
                send(server, CHAT, key)
            else:
                hung_up(server, key).close()

        async def drop_all():
            await asyncio.gather(*(server.drop_session(key) for key in keys))

        asyncio.run(drop_all())
        sessions, trees = server.sessions, server.sessions.manager
        assert not any(map(len, (sessions.store, sessions.inflight, trees.trees, trees._latest, trees._turn_counts)))


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
    state = types.SimpleNamespace(tokenizer=FakeTokenizer(), aborted=False, processor=Processor())
    monkeypatch.setattr(gateway_module, "GenerateState", lambda args: state)
    args = types.SimpleNamespace(
        sglang_router_ip="127.0.0.1", sglang_router_port=1, sglang_tool_call_parser="qwen25",
        sglang_reasoning_parser=None, agent_history="render", agent_gateway_host="127.0.0.2", agent_gateway_port=0,
        partial_rollout=True, use_rollout_routing_replay=False, multimodal_keys={"image": "none"},
        image_min_pixels=None, image_max_pixels=None, allow_image_urls=False,
    )  # fmt: skip

    async def twice():
        return await shared_gateway(args), await shared_gateway(args)

    try:
        server, same = asyncio.run(twice())
        connection = http.client.HTTPConnection("127.0.0.2", server.port, timeout=5)
        connection.request("GET", "/healthz")
        assert json.loads(connection.getresponse().read()) == {"ok": True, "sessions": 0}
        assert server is same and server.url == f"http://127.0.0.2:{server.port}"
        assert (
            server.sessions.pictures is not None and server.sessions.pictures.media.image == Processor.image_token_id
        )
        assert not server.sessions.appends and server.keeps_aborted and not server.is_ending()
        state.aborted = True
        assert server.is_ending()
        server.stop()
    finally:
        gateway_module.SharedGateway.clear_instances()


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
        assert (sample.end_reason, sample.reward_is_trusted) == ("transport", False)
