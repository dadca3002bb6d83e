"""OpenAI's Chat Completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.session import DEFAULT_SID, Reply
from slime.agent.adapters.wire import (
    BadRequest,
    Event,
    flatten_content,
    manager_finish_reason,
    new_id,
    send_events,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
    tool_schema,
)
from slime.agent.parsing import ParsedModelOutput
from slime.agent.trajectory import Message

_PLAIN_ROLES = {"developer": "system", "system": "system", "user": "user", "tool": "tool"}
DEFAULT_MODEL = "slime-actor"


def _request_session_id(request: Any, body: dict[str, Any]) -> str:
    return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID


def _translate_messages(messages: Any) -> list[Message]:
    """OpenAI's messages as chat templates take them: texts, calls with objects, no ids."""
    if not isinstance(messages, list):
        raise BadRequest(f"messages must be a list, not {type(messages).__name__}")
    translated: list[Message] = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role in _PLAIN_ROLES:
            translated.append({"role": _PLAIN_ROLES[role], "content": flatten_content(message.get("content"))})
        elif role == "assistant":
            translated.append(_assistant(message))
    return translated


def _assistant(message: dict[str, Any]) -> Message:
    said: Message = {"role": "assistant", "content": flatten_content(message.get("content"))}
    if message.get("reasoning_content"):
        said["reasoning_content"] = message["reasoning_content"]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, dict)]
    if functions:
        said["tool_calls"] = [
            tool_call_dict(str(function.get("name", "")), arguments_of(function.get("arguments")))
            for function in functions
        ]
    return said


def arguments_of(arguments: Any) -> dict[str, Any]:
    """A call's arguments as an object; text that is none is kept as `{"_raw_arguments": text}`."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"_raw_arguments": arguments}
    return arguments if isinstance(arguments, dict) else {"_raw_arguments": json.dumps(arguments)}


def _tools_to_chat_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Function tools, nested or flat, as chat templates take them; None where there is none."""
    chat_tools = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if function.get("name"):
            chat_tools.append(tool_schema(function["name"], function.get("description"), function.get("parameters")))
    return chat_tools or None


class OpenAIAdapter(BaseAdapter):
    """Sessions of clients that speak Chat Completions; the bearer token is the session's key."""

    logger = logging.getLogger(__name__)
    log_prefix = "openai"
    max_token_keys = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys = ("stop",)

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._handle)

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return _request_session_id(request, body)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        return _translate_messages(body.get("messages")), _tools_to_chat_tools(body.get("tools"))

    def _build_reply(self, parsed: ParsedModelOutput, raw_finish: str, messages: list[Message], tools: Any) -> Reply:
        kept: Message = {"role": "assistant", "content": parsed.text}
        wire: Message = {"role": "assistant", "content": parsed.text}
        if parsed.tool_uses:
            kept["tool_calls"] = [tool_call_dict(use["name"], use["input"]) for use in parsed.tool_uses]
            wire |= {"content": parsed.text or None, "tool_calls": [_wire_call(use) for use in parsed.tool_uses]}
        if parsed.reasoning:
            wire["reasoning_content"] = parsed.reasoning
        return Reply(kept, manager_finish_reason(parsed.tool_uses, raw_finish), wire)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        usage = {"prompt_tokens": in_tok, "completion_tokens": out_tok, "total_tokens": in_tok + out_tok}
        head = {"id": new_id("chatcmpl_"), "created": int(time.time()), "model": body.get("model") or DEFAULT_MODEL}
        if stream:
            return await send_events(request, _chunks({**head, "object": "chat.completion.chunk"}, reply, usage))
        choice = {"index": 0, "message": reply.wire, "finish_reason": reply.finish_reason}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def _wire_call(use: dict[str, Any]) -> dict[str, Any]:
    function = {"name": use["name"], "arguments": json.dumps(use["input"], sort_keys=True)}
    return {"id": new_id("call_"), "type": "function", "function": function}


def _chunks(head: dict[str, Any], reply: Reply, usage: dict[str, int]) -> list[Event]:
    message = reply.wire
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    if message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]})
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
    return [(None, chunk) for chunk in [*chunks, {**head, "choices": [end], "usage": usage}]] + [(None, "[DONE]")]
