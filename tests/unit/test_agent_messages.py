"""What both protocols say, as chat messages and tools: session keys, contents, calls, system messages."""

from __future__ import annotations

from aiohttp.test_utils import make_mocked_request

from slime.agent.adapters import anthropic as anthropic_adapter
from slime.agent.adapters import openai as openai_adapter
from slime.agent.adapters.wire import flatten_content, sid_from_body


def test_session_keys_come_from_headers_and_body_in_order():
    def request(**headers):
        return make_mocked_request("POST", "/", headers=headers)

    key = openai_adapter._request_session_id
    body = {"metadata": {"session_id": "b"}, "user": "c"}
    assert key(request(Authorization="Bearer a"), body) == "a"
    assert key(request(), body) == "b"
    assert (key(request(), {"user": "c"}), key(request(), {})) == ("c", "default")
    key = anthropic_adapter._request_session_id
    both = request(**{"Authorization": "Bearer a", "X-Api-Key": "b"})
    assert (key(both), key(request(**{"X-Api-Key": "b"})), key(request())) == ("a", "b", "default")
    assert sid_from_body({"metadata": {"user_id": "x"}}) is None


def test_contents_become_text():
    blocks = [
        "a",
        {"type": "input_text", "text": "b"},
        {"type": "image_url"},
        {"type": "tool_result", "content": ["c"]},
    ]
    assert flatten_content(blocks) == "a\nb\n[image omitted]\nc"
    assert (flatten_content(None), flatten_content({"content": "x"}), flatten_content(3)) == ("", "x", "3")


def test_openai_messages_become_chat_messages_without_ids():
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}
    translated = openai_adapter._translate_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "[1"}}]},
            {"role": "critic", "content": "no"},
            "no dict",
        ]
    )
    arguments = {"cmd": "ls"}
    function = {"type": "function", "function": {"name": "bash", "arguments": arguments}}
    broken = {"type": "function", "function": {"name": "bash", "arguments": {"_raw_arguments": "[1"}}}
    assert translated == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [function]},
        {"role": "tool", "content": "a.py"},
        {"role": "assistant", "content": "", "tool_calls": [broken]},
    ]


def test_tools_of_both_protocols_become_chat_tools():
    empty = {"type": "object", "properties": {}}
    flat = {"type": "function", "name": "read"}
    nested = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}
    chat_tools = openai_adapter._tools_to_chat_tools([flat, nested, {"type": "web_search"}, {"type": "function"}])
    assert [tool["function"] for tool in chat_tools] == [
        {"name": "read", "description": "", "parameters": empty},
        {"name": "bash", "description": "d", "parameters": {"type": "object"}},
    ]
    assert openai_adapter._tools_to_chat_tools([{"type": "web_search"}]) is None
    chat_tools = anthropic_adapter._tools_to_chat_tools(
        [{"name": "a", "parameters": {"type": "object"}}, {"name": "b"}]
    )
    assert [tool["function"]["parameters"] for tool in chat_tools] == [{"type": "object"}, empty]


def test_anthropic_messages_become_chat_messages():
    use = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"cmd": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}]}
    translated = anthropic_adapter._translate_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                    use,
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        [{"type": "text", "text": "be brief"}],
    )
    call = {"type": "function", "function": {"name": "bash", "arguments": {"cmd": "ls"}}}
    assert translated == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "ab", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "a.py"},
        {"role": "user", "content": "go on"},
    ]


def reminder(text):
    return {"type": "text", "text": f"<system-reminder>\n{text}\n</system-reminder>\n"}


def test_system_messages_in_the_middle_become_reminders():
    fold = anthropic_adapter._fold_mid_list_system_into_user
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "x"}
    body = {"messages": [user, system]}
    assert fold(body)
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}, reminder("x")]}]
    body = {"messages": [answer, system, user]}
    assert fold(body)
    assert body["messages"][1:] == [{"role": "user", "content": [reminder("x"), {"type": "text", "text": "hi"}]}]
    body = {"messages": [answer, system]}
    assert fold(body) and body["messages"][1:] == [{"role": "user", "content": [reminder("x")]}]
    body = {"messages": [system, user]}
    assert not fold(body) and body["messages"] == [system, user]
    body = {"messages": [user, answer, system, user]}
    fold(body, keeps_history=True)
    assert body["messages"][0] == user, "what the model has answered stays as it was"
