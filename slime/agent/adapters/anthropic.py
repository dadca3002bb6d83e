"""Anthropic's Messages: POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.session import DEFAULT_SID, Reply, Session
from slime.agent.adapters.wire import (
    BadRequest,
    Event,
    Refused,
    content_of,
    flatten_content,
    header,
    json_answer,
    manager_finish_reason,
    new_id,
    send_events,
    sid_from_bearer,
    tool_call_dict,
    tool_schema,
)
from slime.agent.parsing import ParsedModelOutput
from slime.agent.pictures import width
from slime.agent.trajectory import Message

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def _request_session_id(request: Any) -> str:
    return sid_from_bearer(request) or header(request, "X-Api-Key") or DEFAULT_SID


def _fold_mid_list_system_into_user(body: dict[str, Any], *, keeps_history: bool = False) -> bool:
    """Turn system messages behind the first message into reminders for the user; returns whether there were any.

    Args:
        body: changed in place.
        keeps_history: leave a user message alone that the model has answered: a session could not be continued.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return False
    kept: list[Any] = messages[:1]
    waiting: list[dict[str, Any]] = []
    found = False
    for message in messages[1:]:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "system":
            found = True
            text = f"<system-reminder>\n{flatten_content(message.get('content'))}\n</system-reminder>\n"
            block = {"type": "text", "text": text}
            if (user := _nearest_user(kept, keeps_history)) is not None:
                kept[user] = {**kept[user], "content": [*_blocks(kept[user].get("content")), block]}
            else:
                waiting.append(block)
            continue
        if waiting and role == "user":
            message, waiting = {**message, "content": [*waiting, *_blocks(message.get("content"))]}, []
        kept.append(message)
    if waiting:
        kept.append({"role": "user", "content": waiting})
    body["messages"] = kept
    return found


def _nearest_user(messages: list[Any], keeps_history: bool) -> int | None:
    for index in range(len(messages) - 1, -1, -1):
        role = messages[index].get("role") if isinstance(messages[index], dict) else None
        if role == "user":
            return index
        if keeps_history and role == "assistant":
            return None
    return None


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])


def _translate_messages(messages: Any, system: Any) -> list[Message]:
    """Anthropic's messages as chat templates take them: texts, calls with objects, no ids."""
    if not isinstance(messages, list):
        raise BadRequest(f"messages must be a list, not {type(messages).__name__}")
    translated: list[Message] = [{"role": "system", "content": flatten_content(system)}] if system else []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            translated.append(_assistant(_blocks(message.get("content"))))
        elif role == "user":
            translated += _user(message.get("content"))
        elif role == "system":
            translated.append({"role": "system", "content": flatten_content(message.get("content"))})
    return translated


def _user(content: Any) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    for is_result, group in itertools.groupby(
        content or (), lambda block: isinstance(block, dict) and block.get("type") == "tool_result"
    ):
        blocks = list(group)
        together = content_of(blocks)
        if isinstance(together, list) and not is_result:  # an image and the words about it
            messages.append({"role": "user", "content": together})
            continue
        role = "tool" if is_result else "user"
        messages += [{"role": role, "content": content_of(block)} for block in blocks]
    return messages


def _assistant(blocks: list[Any]) -> Message:
    blocks = [block for block in blocks if isinstance(block, dict)]
    texts = [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]
    said: Message = {"role": "assistant", "content": "".join(texts)}
    thoughts = [str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"]
    if any(thoughts):
        said["reasoning_content"] = "".join(thoughts)
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    if uses:
        said["tool_calls"] = [tool_call_dict(use.get("name", ""), use.get("input") or {}) for use in uses]
    return said


def _tools_to_chat_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as chat templates take them; None where there is none."""
    named = [tool for tool in tools or () if isinstance(tool, dict) and tool.get("name")]
    chat_tools = [
        tool_schema(tool["name"], tool.get("description"), tool.get("input_schema") or tool.get("parameters"))
        for tool in named
    ]
    return chat_tools or None


class AnthropicAdapter(BaseAdapter):
    """Sessions of clients that speak Messages; the bearer token or the API key is the session's key."""

    logger = logging.getLogger(__name__)
    log_prefix = "anthropic"
    max_token_keys = ("max_tokens",)
    stop_keys = ("stop_sequences",)

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self._handle)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return _request_session_id(request)

    def _preprocess_body(self, body: dict[str, Any]) -> None:
        _fold_mid_list_system_into_user(body, keeps_history=self.sessions.appends)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        messages = _translate_messages(body.get("messages"), body.get("system"))
        return messages, _tools_to_chat_tools(body.get("tools"))

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Say how long the prompt of a request would be; nothing is generated, and no session is made."""
        try:
            body = await self._read_body(request)
            known = self.store.get(self._session_id(request, body)) or Session()
            prompt = await self.make_prompt(known, *await self._chat_of(request, body, known))
            images = self.sessions.images_of(known, prompt)
        except Refused as error:
            return error.response()
        return web.json_response({"input_tokens": width(prompt.ids, images)})

    def _too_long(self, num_tokens: int, limit: int) -> Refused:
        return BadRequest(f"prompt is too long: {num_tokens} tokens > {limit} maximum")  # clients look for these words

    def _build_reply(self, parsed: ParsedModelOutput, raw_finish: str, messages: list[Message], tools: Any) -> Reply:
        kept: Message = {"role": "assistant", "content": parsed.text}
        blocks: list[dict[str, Any]] = []
        if parsed.reasoning:
            kept["reasoning_content"] = parsed.reasoning
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text:
            blocks.append({"type": "text", "text": parsed.text})
        if parsed.tool_uses:
            kept["tool_calls"] = [tool_call_dict(use["name"], use["input"]) for use in parsed.tool_uses]
            blocks += [{"type": "tool_use", "id": new_id("toolu_", 16), **use} for use in parsed.tool_uses]
        blocks = blocks or [{"type": "text", "text": ""}]
        return Reply(kept, manager_finish_reason(parsed.tool_uses, raw_finish), blocks)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        message = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or "slime-actor",
            "content": reply.wire,
            "stop_reason": _STOP_REASONS.get(reply.finish_reason, "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": in_tok, "output_tokens": out_tok},
        }
        return await send_events(request, _events(message)) if stream else json_answer(message)


def _events(message: dict[str, Any]) -> list[Event]:
    usage = message["usage"]
    begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty, delta = _start_and_delta(block)
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
    return [(event["type"], event) for event in events]


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
