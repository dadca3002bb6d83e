"""What the gateway guards: budgets, repeated requests, hang-ups, forced calls, aborts, engines that fail."""

from __future__ import annotations

import base64
import logging
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from slime.agent.adapters import guarded
from slime.agent.gateway import Budget
from slime.utils.types import Sample
from tests.unit.agent_fakes import (
    ANTHROPIC_TOOLS,
    ASK,
    CALL,
    CHAT,
    MESSAGES,
    TOOLS,
    anthropic_client,
    finish,
    gateway,
    hung_up,
    openai_client,
    opened,
    send,
    text_of,
    until,
)

Status = Sample.Status


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


def test_a_turn_whose_client_is_gone_ends_with_its_session_and_with_time(monkeypatch):
    with gateway(["abc", "d"], delay_s=1.5) as (server, engine):
        key = opened(server)
        with hung_up(server, key):
            until(lambda: engine.requests)
        until(lambda: len(server.sessions.inflight[key]) == 1)
        started = time.monotonic()
        assert finish(server, key) == [] and time.monotonic() - started < 2
        until(lambda: engine.aborted)
        monkeypatch.setattr(guarded, "_ABANDONED_S", 0.1)
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


def test_an_engine_that_fails_ends_a_session_by_transport_until_it_answers(monkeypatch):
    with gateway(["a", "b"]) as (server, engine):
        key = opened(server)
        assert send(server, CHAT, key)[0] == 200
        engine.failures = [(500, "x")] * 2
        monkeypatch.setattr("slime.utils.http_utils.CLIENT.limits.retry_window_s", 0.0)
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
    assert (sample.rollout_routed_experts == 2).all(), "every prompt was rendered: the last call has read every token"
