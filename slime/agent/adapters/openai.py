"""OpenAI's Chat Completions and Responses: POST /v1/chat/completions and /v1/responses."""

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
    Refused,
    content_of,
    flatten_content,
    json_answer,
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
_STATEFUL_KEYS = ("previous_response_id", "conversation", "background")


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
            translated.append({"role": _PLAIN_ROLES[role], "content": content_of(message.get("content"))})
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
    namespaced = [tool for tool, _, _ in _in_namespaces(tools).values()]
    for tool in [*tools, *namespaced] if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if function.get("name"):
            chat_tools.append(tool_schema(function["name"], function.get("description"), function.get("parameters")))
    return chat_tools or None


def _in_namespaces(tools: Any) -> dict[str, tuple[dict[str, Any], Any, str]]:
    """The tools of namespaces, as Codex sends those of MCP servers: {name for the model: (tool, namespace, name)}."""
    found = {}
    for space in tools if isinstance(tools, list) else ():
        if isinstance(space, dict) and space.get("type") == "namespace" and isinstance(space.get("tools"), list):
            for tool in space["tools"]:
                if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                    full = _full_name(space.get("name"), tool["name"])
                    found[full] = {**tool, "name": full}, space.get("name"), tool["name"]
    return found


def _full_name(space: Any, name: Any) -> str:
    return f"{space}__{name}" if space else str(name)


class OpenAIAdapter(BaseAdapter):
    """Sessions of clients that speak Chat Completions or Responses; the bearer token is the session's key."""

    logger = logging.getLogger(__name__)
    log_prefix = "openai"
    max_token_keys = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys = ("stop",)

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/v1/responses", self._handle)

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return _request_session_id(request, body)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        messages = _translate_input(body) if _is_responses(body) else _translate_messages(body.get("messages"))
        return messages, _tools_to_chat_tools(body.get("tools"))

    def _too_long(self, num_tokens: int, limit: int) -> Refused:
        message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
        message += f"{num_tokens} tokens. Please reduce the length of the messages."
        return BadRequest(message, code="context_length_exceeded", param="messages")

    def _build_reply(self, parsed: ParsedModelOutput, raw_finish: str, messages: list[Message], tools: Any) -> Reply:
        kept: Message = {"role": "assistant", "content": parsed.text}
        wire: Message = {"role": "assistant", "content": parsed.text}
        if parsed.tool_uses:
            kept["tool_calls"] = [tool_call_dict(use["name"], use["input"]) for use in parsed.tool_uses]
            calls = [
                {
                    "id": new_id("call_"),
                    "type": "function",
                    "function": {"name": use["name"], "arguments": json.dumps(use["input"], sort_keys=True)},
                }
                for use in parsed.tool_uses
            ]
            wire |= {"content": parsed.text or None, "tool_calls": calls}
        if parsed.reasoning:
            wire["reasoning_content"] = parsed.reasoning
        return Reply(kept, manager_finish_reason(parsed.tool_uses, raw_finish), wire)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        if _is_responses(body):
            response = _response(body, reply, in_tok, out_tok)
            return await send_events(request, _response_events(response)) if stream else json_answer(response)
        usage = {"prompt_tokens": in_tok, "completion_tokens": out_tok, "total_tokens": in_tok + out_tok}
        head = {"id": new_id("chatcmpl_"), "created": int(time.time()), "model": body.get("model") or DEFAULT_MODEL}
        if stream:
            return await send_events(request, _chunks({**head, "object": "chat.completion.chunk"}, reply, usage))
        choice = {"index": 0, "message": reply.wire, "finish_reason": reply.finish_reason}
        return json_answer({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def _chunks(head: dict[str, Any], reply: Reply, usage: dict[str, int]) -> list[Event]:
    message = reply.wire
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    if message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]})
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
    return [(None, chunk) for chunk in [*chunks, {**head, "choices": [end], "usage": usage}]] + [(None, "[DONE]")]


def _is_responses(body: dict[str, Any]) -> bool:
    return "input" in body and "messages" not in body


def _translate_input(body: dict[str, Any]) -> list[Message]:
    """The items of a Responses request as chat messages; those that one answer consisted of become one message."""
    for key in _STATEFUL_KEYS:
        if body.get(key):
            raise BadRequest(f"{key}: the server keeps no responses; send the whole conversation as input")
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadRequest(f"input must be a text or a list, not {type(items).__name__}")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": flatten_content(body["instructions"])})
    answer: Message | None = None
    for item in items:
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            if answer is None:
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add_to_answer(answer, kind, item)
            continue
        answer = None
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": content_of(item.get("output"))})
        elif kind == "message" and item.get("role") in _PLAIN_ROLES:
            messages.append({"role": _PLAIN_ROLES[item["role"]], "content": content_of(item.get("content"))})
    return messages


def _add_to_answer(answer: Message, kind: str, item: dict[str, Any]) -> None:
    if kind == "function_call":
        call = tool_call_dict(
            _full_name(item.get("namespace"), item.get("name", "")), arguments_of(item.get("arguments"))
        )
        answer.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = "".join(str(part.get("text") or "") for part in item.get("summary") or ())
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
    else:
        answer["content"] += flatten_content(item.get("content"))


def _items(message: Message, tools: Any) -> list[dict[str, Any]]:
    """The output items of an answer: its thought, its text, its calls of a request's tools."""
    spaces = _in_namespaces(tools)
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": summary})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        head = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for call in calls:
        head = {"type": "function_call", "id": new_id("fc_"), "call_id": call["id"], "status": "completed"}
        item = {**head, **call["function"]}
        if item["name"] in spaces:
            _, item["namespace"], item["name"] = spaces[item["name"]]
        items.append(item)
    return items


def _response(body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> dict[str, Any]:
    is_cut = reply.finish_reason == "length"
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": body.get("model") or DEFAULT_MODEL,
        "output": _items(reply.wire, body.get("tools")),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {"input_tokens": in_tok, "output_tokens": out_tok, "total_tokens": in_tok + out_tok},
    }


def _response_events(response: dict[str, Any]) -> list[Event]:
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        events += [{"output_index": index, **event} for event in _item_events(item)]
    events.append({"type": f"response.{response['status']}", "response": response})
    return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]


def _item_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    where, begun = {"item_id": item["id"]}, {**item, "status": "in_progress"}
    middle: list[dict[str, Any]] = []
    if item["type"] == "message":
        where |= {"content_index": 0}
        part: dict[str, Any] = item["content"][0]
        begun["content"] = []
        middle = [
            {"type": "response.content_part.added", "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", "part": part},
        ]
    elif item["type"] == "function_call":
        begun["arguments"] = ""
        middle = [
            {"type": "response.function_call_arguments.delta", "delta": item["arguments"]},
            {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"]},
        ]
    added = {"type": "response.output_item.added", "item": begun}
    done = {"type": "response.output_item.done", "item": item}
    return [added, *({**event, **where} for event in middle), done]
