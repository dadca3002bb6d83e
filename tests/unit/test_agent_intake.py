"""What a request repeats of the one before: it is read once, and everything comes out as if it were read again."""

from __future__ import annotations

import copy
import random
from typing import Any

import orjson
import pytest

from slime.agent import history
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.wire import new_id
from slime.agent.history import Intake, Seen, to_json
from tests.unit.agent_fakes import FakeTokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "a.py"}
KINDS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"role": "user", "content": "u"},
        {"role": "tool", "tool_call_id": "c", "content": "a.py"},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
    RESPONSES: [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "said"},
    ],
    MESSAGES: [
        {"role": "user", "content": "u"},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and now?"}]},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "ls", "input": {}}]},
    ],
}
FRAMES = [
    {},
    {"tools": [{"name": "ls", "input_schema": {"type": "object"}, "type": "function"}]},
    {"system": "be brief"},
]


class Reader:
    """Reads requests as the gateway does: with what the session's request before has left, or without."""

    def __init__(self, path: str) -> None:
        kind = AnthropicAdapter if path == MESSAGES else OpenAIAdapter
        self.adapter: Any = kind(tokenizer=FakeTokenizer(), sglang_url="http://nowhere")
        self.path, self.seen, self.num_known = path, Seen(), 0

    def read(self, body: dict[str, Any], *, seen: Seen) -> tuple[Any, Any, bytes]:
        body = copy.deepcopy(body)
        intake = Intake(seen, self.path, body)
        self.num_known += intake.num_known
        if not intake.num_known:
            self.adapter._preprocess_body(body)
        digest = intake.digest(body)
        self.seen = intake.seen_as(*self.adapter._translate(intake.new_body(body)))
        return self.seen.messages, self.seen.tools, digest


@pytest.mark.parametrize("path", KINDS)
def test_what_is_known_of_a_request_changes_nothing_of_its_messages_tools_and_digest(path):
    rng, reader, name = random.Random(7), Reader(path), "input" if path == RESPONSES else "messages"
    for _ in range(60):
        items: list[Any] = [KINDS[path][0]]
        frame = rng.choice(FRAMES)
        for _ in range(12):
            chance = rng.random()
            if chance < 0.1:
                frame = rng.choice(FRAMES)
            elif chance < 0.2:
                items = items[: rng.randint(1, len(items))]
            items = items + rng.choices(KINDS[path], k=rng.randint(0, 3))
            body = {"model": "m", name: items, **frame}
            assert reader.read(body, seen=reader.seen) == reader.read(body, seen=Seen())
    assert reader.num_known > 1000, "most of it was known"


def test_only_what_is_new_is_translated_and_the_texts_of_what_is_known_are_held_once():
    reader, messages = Reader(CHAT), [{"role": "user", "content": "a long text"}]
    reader.read({"messages": messages}, seen=Seen())
    before = reader.seen
    more = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    intake = Intake(before, CHAT, body := orjson.loads(orjson.dumps({"messages": more, "stream": True})))
    assert intake.num_known == 1 and intake.new == more[1:]
    assert body["messages"][0] is before.items[0], "the text that was read again can be forgotten"
    again = intake.seen_as(*reader.adapter._translate(intake.new_body(body)))
    assert again.messages[0] is before.messages[0] and len(again.messages) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "ls"}]},
        {"input": "a"},
        {"input": "b"},
    ],
)
def test_other_requests_have_other_digests_and_a_stream_does_not_matter(other):
    body = {"messages": [{"role": "user", "content": "a"}]}
    digest = Intake(Seen(), CHAT, body).digest(body)
    assert Intake(Seen(), CHAT, {**body, "stream": True}).digest({**body, "stream": True}) == digest
    assert Intake(Seen(), MESSAGES, body).digest(body) != digest
    assert Intake(Seen(), CHAT, other).digest(other) != digest
    texts = [{"input": text} for text in "ab"]
    assert Intake(Seen(), CHAT, texts[0]).digest(texts[0]) != Intake(Seen(), CHAT, texts[1]).digest(texts[1])


def test_tools_that_the_request_before_had_are_not_written_again_for_its_digest(monkeypatch):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "ls"}], "max_tokens": 3}
    first = Intake(Seen(), CHAT, body)
    digest, seen = first.digest(body), first.seen_as(body["messages"], body["tools"])
    again = Intake(seen, CHAT, copy.deepcopy(body))
    written = []
    monkeypatch.setattr(history, "to_json", lambda value, **keys: written.append(value) or to_json(value, **keys))
    assert again.digest(body) == digest
    assert written == [{"max_tokens": 3}]


def test_ids_are_of_the_length_that_is_asked_for_and_never_equal():
    ids = {new_id("toolu_", 16) for _ in range(1000)}
    assert len(ids) == 1000 and {len(text) for text in ids} == {len("toolu_") + 16}
