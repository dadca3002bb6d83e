"""OpenAI's Responses over the sessions of OpenAIAdapter, with the real `openai` client: the wire that Codex speaks."""

from __future__ import annotations

import json

import openai
import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters import openai as openai_adapter
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.unit.agent_fakes import finish, raw, serving

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("bash", "read")]
CALL = "<tool_call><function=bash><parameter=cmd>ls</parameter></function></tool_call>"
READ = "<tool_call><function=read><parameter=path>a</parameter></function></tool_call>"


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)


def ask(client, stream, **kwargs):
    if not stream:
        return client.responses.create(model="m", **kwargs)
    with client.responses.stream(model="m", **kwargs) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_makes_parallel_calls_and_goes_on_in_one_sample(stream):
    texts = [f"<think>\nhm\n</think>\n\nLook.{CALL}{READ}<|im_end|>", "<think>\nso\n</think>\n\ndone<|im_end|>"]
    tokenizer = family_tokenizer("qwen3")
    parsers = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    with serving(OpenAIAdapter, texts, tokenizer=tokenizer, **parsers) as (adapter, url, engine):
        client = client_of(url)
        first = ask(client, stream, instructions="be brief", input="hi", tools=TOOLS, max_output_tokens=77)
        assert (first.status, first.output_text) == ("completed", "Look.")
        thought, said, *calls = first.output
        assert (thought.summary[0].text, said.role) == ("hm", "assistant")
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("bash", {"cmd": "ls"}), ("read", {"path": "a"})]
        replay = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in first.output)]
        replay += [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
        second = ask(client, stream, instructions="be brief", input=replay, tools=TOOLS)
        assert second.output_text == "done"
        prompts = [request["input_ids"] for request in engine.requests]
        assert prompts[1][: len(prompts[0]) + len(engine.outputs[0])] == prompts[0] + engine.outputs[0]
        assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 77
        assert first.usage.input_tokens == len(prompts[0])
        [sample] = finish(adapter)
    assert sample.metadata["agent"]["turns"] == 2 and sample.metadata["use_tool"]
    assert sum(sample.loss_mask) == sum(map(len, engine.outputs))


def test_tools_of_a_namespace_are_shown_under_one_name_and_called_under_two():
    tools = [*TOOLS, {"type": "namespace", "name": "mcp__files", "description": "", "tools": TOOLS}]
    call = CALL.replace("function=bash", "function=mcp__files__bash")
    with serving(OpenAIAdapter, [f"{call}{READ}<|im_end|>", "done<|im_end|>"], tokenizer=family_tokenizer("qwen3"),
                 tool_parser="qwen3_coder") as (adapter, url, engine):  # fmt: skip
        body = {"input": [{"role": "user", "content": "hi"}], "tools": tools}
        first = json.loads(raw(url, "/v1/responses", body, Authorization="Bearer s")[1])
        names = [(item["name"], item.get("namespace")) for item in first["output"]]
        assert names == [("bash", "mcp__files"), ("read", None)]
        results = [{"type": "function_call_output", "call_id": i["call_id"], "output": "x"} for i in first["output"]]
        body["input"] += [*first["output"], *results]
        assert raw(url, "/v1/responses", body, Authorization="Bearer s")[0] == 200
        [sample] = finish(adapter)
        shown = engine.tokenizer.decode(engine.requests[0]["input_ids"])
    assert '"name": "mcp__files__read"' in shown and '"name": "read"' in shown
    assert sample.metadata["agent"]["breaks"] == 0 and sample.metadata["agent"]["turns"] == 2


def test_items_become_chat_messages_and_those_of_one_answer_become_one():
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "more"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"cmd": "ls"}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a.py"}]},
            {"type": "function_call", "call_id": "d", "name": "bash", "arguments": "[1"},
            {"type": "web_search_call"},
        ],
    }
    calls = [{"cmd": "ls"}, {"_raw_arguments": "[1"}]
    first, second = ({"type": "function", "function": {"name": "bash", "arguments": call}} for call in calls)
    assert openai_adapter._translate_input(body) == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "more"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [first]},
        {"role": "tool", "content": "a.py"},
        {"role": "assistant", "content": "", "tool_calls": [second]},
    ]


def test_a_stream_has_the_events_that_clients_wait_for_in_order():
    with serving(OpenAIAdapter, [f"Look.{CALL}"]) as (_, url, _engine):
        _, text = raw(url, "/v1/responses", {"input": "hi", "tools": TOOLS, "stream": True})
    events = [json.loads(event.partition("data: ")[2]) for event in text.strip().split("\n\n")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    item = ["output_item.added", "output_item.done"]
    assert kinds == ["created", "in_progress", item[0], *message, item[1], item[0], *call, item[1], "completed"]
    assert events[-1]["response"]["output"][1]["arguments"] == '{"cmd": "ls"}'


def test_an_answer_that_was_cut_off_is_incomplete():
    with serving(OpenAIAdapter, ["hel"], finish="length") as (_, url, _engine):
        response = client_of(url).responses.create(model="m", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": 3}, "input must be a text or a list"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id: the server keeps no responses"),
        ({"input": []}, "there is none"),
    ],
)
def test_bad_bodies_are_400_and_say_why(body, message):
    with serving(OpenAIAdapter, ["a"]) as (_, url, engine):
        status, text = raw(url, "/v1/responses", body)
        assert status == 400 and message in json.loads(text)["error"]["message"]
        assert not engine.requests
