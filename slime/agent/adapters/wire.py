"""Wire formats that the protocols share: contents as text, session keys of a request, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from slime.agent.history import to_json
from slime.utils.async_utils import cancel_all

_STREAM = web.RequestKey("event_stream", web.StreamResponse)
_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image", "image_url", "input_image")
Event = tuple[str | None, Any]


class Refused(ValueError):
    """A request that is not answered, as its client will read it.

    Args:
        message: what is wrong.
        status: of HTTP.
        kind: the protocols' name of the error ("invalid_request_error").
        code: OpenAI's own name, which its clients look at.
        param: the field of the body that is wrong.
        may_retry: False tells clients that sending it again is useless.
    """

    def __init__(
        self,
        message: str,
        status: int,
        kind: str,
        *,
        code: str | None = None,
        param: str | None = None,
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status, self.may_retry = status, may_retry
        more = {key: value for key, value in (("code", code), ("param", param)) if value is not None}
        self.body = {"type": "error", "error": {"type": kind, "message": message, **more}}

    def response(self) -> web.Response:
        """The error as both protocols have it."""
        headers = None if self.may_retry else {"x-should-retry": "false"}
        return web.json_response(self.body, status=self.status, headers=headers)


class BadRequest(Refused):
    """A body that cannot be answered: status 400."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, 400, "invalid_request_error", code=code, param=param)


def flatten_content(content: Any) -> str:
    """The text of a message's content: a string, None, or a list of strings and blocks.

    Example:
        >>> flatten_content([{"type": "text", "text": "a"}, {"type": "image"}, "", "b"])
        'a\\n[image omitted]\\nb'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, map(flatten_content, content)))
    if not isinstance(content, dict):
        return str(content)
    kind = content.get("type")
    if kind in _TEXTS:
        return str(content.get("text") or "")
    if kind in _IMAGES:
        return "[image omitted]"
    return flatten_content(
        content.get("content") if kind == "tool_result" else content.get("content") or content.get("text")
    )


def content_of(content: Any) -> str | list[dict[str, Any]]:
    """A content as chat templates take it: its text, or its parts where there are images, which are URIs yet.

    Example:
        >>> content_of(["a", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
        [{'type': 'text', 'text': 'a'}, {'type': 'image', 'image': 'data:image/png;base64,AA'}]
    """
    parts: list[dict[str, Any]] = []
    for block in _flat(content):
        if isinstance(block, dict) and block.get("type") in _IMAGES:
            parts.append({"type": "image", "image": _uri_of(block)})
        elif text := flatten_content(block):
            parts.append({"type": "text", "text": text})
    return parts if any(part["type"] == "image" for part in parts) else flatten_content(content)


def _flat(content: Any) -> list[Any]:
    """Blocks, with those of tools' results in their places."""
    if isinstance(content, dict) and content.get("type") == "tool_result":
        return _flat(content.get("content"))
    return [one for block in content for one in _flat(block)] if isinstance(content, list) else [content]


def _uri_of(block: dict[str, Any]) -> str:
    """What a block of OpenAI's or Anthropic's says of its image; "" where that is nothing to open."""
    source = block.get("image_url") or block.get("source")
    if isinstance(source, dict):
        is_data = source.get("type") == "base64"
        source = f"data:{source.get('media_type')};base64,{source.get('data')}" if is_data else source.get("url")
    return source if isinstance(source, str) else ""


def omits_images(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a model that sees no images: its text says where they were."""
    content = message.get("content")
    return {**message, "content": flatten_content(content)} if isinstance(content, list) else message


def tool_call_dict(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates take it: arguments are an object, and there is no id."""
    return {"type": "function", "function": {"name": name, "arguments": args}}


def tool_schema(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates take it."""
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def manager_finish_reason(tool_uses: list[dict[str, Any]], raw: str) -> str:
    """OpenAI's word for how a turn ended."""
    if tool_uses:
        return "tool_calls"
    return "length" if raw == "length" else "stop"


_ids = itertools.count(secrets.randbits(64))  # nobody has to guess them: randomness for each would cost a system call


def new_id(prefix: str = "", num_hex: int = 24) -> str:
    """An id that no other of this process or, most likely, of others equals."""
    return f"{prefix}{next(_ids) % (1 << 4 * num_hex):0{num_hex}x}"


def header(request: Any, name: str) -> str:
    """A header of a request; "" where it has none."""
    return str(request.headers.get(name) or request.headers.get(name.lower()) or "").strip()


def sid_from_bearer(request: Any) -> str | None:
    """The bearer token of a request."""
    scheme, _, token = header(request, "Authorization").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def sid_from_body(body: dict[str, Any]) -> str | None:
    """The session that a body names: `metadata.session_id`, then `user`."""
    metadata = body.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, dict) else None
    return str(named or body.get("user") or "") or None


_ROLES = ("system", "developer", "user", "assistant", "tool")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_SERVED = (*_TEXTS, "tool_result", "tool_use", "thinking", "redacted_thinking", "refusal")


def check_shape(body: dict[str, Any], *, num_known: int = 0, takes_images: bool = False) -> None:
    """Check the fields of a request that are read, of all protocols.

    Args:
        body: of the request.
        num_known: messages, or items, at its head that were checked with the request before, as its tools were.
        takes_images: the model sees them.

    Raises:
        BadRequest: one has a wrong shape; it is named.
    """
    for name in ("messages", "tools"):
        _check(body.get(name) is None or isinstance(body[name], list), name, body.get(name), "a list")
    for name in ("temperature", "top_p", "top_k"):
        if (value := body.get(name)) is not None:
            _check(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
    for name in ("stop", "stop_sequences"):
        if (value := body.get(name)) is not None:
            texts = value if isinstance(value, list) else [value]
            _check(all(isinstance(text, str) for text in texts), name, value, "a text or a list of texts")
    _check(body.get("functions") is None, "functions", body.get("functions"), "left out: send tools")
    for index, tool in enumerate(() if num_known else body.get("tools") or ()):
        _check(isinstance(tool, dict), f"tools[{index}]", tool, "an object")
        nested = tool.get("function", {})
        _check(isinstance(nested, dict), f"tools[{index}].function", nested, "an object")
        for name in ("name", "description"):
            text = {**tool, **nested}.get(name)
            _check(text is None or isinstance(text, str), f"tools[{index}].{name}", text, "a text")
    for index, message in enumerate((body.get("messages") or ())[num_known:], num_known):
        if not _is_plain(message) or message.get("role") not in _ROLES:
            _check_message(f"messages[{index}]", message, takes_images)
    items = body.get("input")
    for index, item in enumerate(items[num_known:] if isinstance(items, list) else (), num_known):
        name = f"input[{index}]"
        _check(isinstance(item, dict), name, item, "an object")
        kind = item.get("type", "message")
        _check(kind in _ITEMS, f"{name}.type", kind, f"one of {', '.join(_ITEMS)}")
        if kind == "message":
            _check_message(name, item, takes_images)
        summary = item.get("summary")
        is_summary = isinstance(summary, list) and all(isinstance(part, dict) for part in summary)
        _check(summary is None or is_summary, f"{name}.summary", summary, "a list of objects")


def _is_plain(message: Any) -> bool:
    """Return whether a message is a text alone, as most of a long conversation are."""
    return type(message) is dict and type(message.get("content")) is str and not message.get("tool_calls")


def _check_message(name: str, message: Any, takes_images: bool) -> None:
    _check(isinstance(message, dict), name, message, "an object")
    _check(message.get("role") in _ROLES, f"{name}.role", message.get("role"), f"one of {', '.join(_ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    is_content = content is None or isinstance(content, str | list)
    _check(is_content, f"{name}.content", content, "a text or a list of blocks")
    for index, block in enumerate(content if isinstance(content, list) else ()):
        is_typed = isinstance(block, dict) and isinstance(block.get("type"), str)
        _check(is_typed or isinstance(block, str), f"{name}.content[{index}]", block, "an object with a type")
        is_shown = takes_images or not is_typed or block["type"] not in _IMAGES
        _check(
            is_shown, f"{name}.content[{index}]", block, "a text: without --multimodal-keys the model sees no images"
        )
        if is_typed and block["type"] == "tool_use":
            where = f"{name}.content[{index}]"
            _check(isinstance(block.get("name"), str), f"{where}.name", block.get("name"), "a text")
            _check(isinstance(block.get("input"), dict), f"{where}.input", block.get("input"), "an object")
    _check(calls is None or isinstance(calls, list), f"{name}.tool_calls", calls, "a list")
    for index, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        _check(is_named, f"{name}.tool_calls[{index}]", call, "an object with function.name")


def _check(is_right: bool, name: str, value: Any, wanted: str) -> None:
    if not is_right:
        raise BadRequest(f"{name}: {str(value)[:100]!r} must be {wanted}", param=name)


def unserved(body: dict[str, Any], items: list[Any], *, takes_images: bool = False) -> set[str]:
    """What of a well-shaped request no model gets: kinds of content, in its items, and of tools."""
    served = (*_SERVED, *_IMAGES) if takes_images else _SERVED
    found = {f"tools: {tool['type']}" for tool in body.get("tools") or () if _is_unserved_tool(tool)}
    for item in items:
        content = item.get("content")
        if type(content) is str:
            continue
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if isinstance(block, dict) else None  # a tool's result may hold an image
            for part in (block, *(inner if isinstance(inner, list) else ())):
                if isinstance(part, dict) and part.get("type") not in served:
                    found.add(f"content: {part.get('type')}")
    if body.get("parallel_tool_calls") is False:
        found.add("parallel_tool_calls")
    return found


def _is_unserved_tool(tool: dict[str, Any]) -> bool:
    return tool.get("type", "function") not in ("function", "custom", "namespace") or (
        tool.get("type") == "custom" and "input_schema" not in tool
    )


def tool_choice(body: dict[str, Any]) -> tuple[str, str | None]:
    """Read what a request says of calls: ("auto", "none", "required" or "tool", the tool's name or None).

    Raises:
        BadRequest: it says something else.
    """
    choice = body.get("tool_choice") or "auto"
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("auto", "none"):
        return kind, None
    if kind in ("required", "any"):
        return "required", None
    if isinstance(choice, dict) and kind in ("function", "tool"):
        function = choice.get("function")
        name = (function if isinstance(function, dict) else choice).get("name")
        if isinstance(name, str) and name:
            return "tool", name
    wanted = "it is none, auto, required or any, or it names a tool"
    raise BadRequest(f"tool_choice {str(choice)[:200]!r}: {wanted}", param="tool_choice")


def model_list(name: str, *, created: int) -> dict[str, Any]:
    """The one model of a server, with the fields of both protocols."""
    begun = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    openai = {"id": name, "object": "model", "created": created, "owned_by": "slime"}
    model = {**openai, "type": "model", "display_name": name, "created_at": begun}
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}


def json_answer(value: Any) -> web.Response:
    """A whole answer."""
    return web.Response(body=to_json(value), content_type="application/json")


async def send_events(request: web.Request, events: Iterable[Event]) -> web.StreamResponse:
    """Write events, (name or None, text or what JSON can show), and end the stream."""
    stream = await _stream_of(request)
    for name, data in events:
        head = f"event: {name}\n".encode() if name else b""
        await stream.write(head + b"data: " + (data.encode() if isinstance(data, str) else to_json(data)) + b"\n\n")
    await stream.write_eof()
    return stream


def has_begun(request: web.Request) -> bool:
    """Return whether the answer is being streamed, which leaves no way to send a status."""
    return _STREAM in request


async def _stream_of(request: web.Request) -> web.StreamResponse:
    if _STREAM not in request:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        request[_STREAM] = stream
    return request[_STREAM]


@contextlib.asynccontextmanager
async def keep_alive(request: web.Request, interval_s: float) -> AsyncIterator[None]:
    """Send comments, which every client skips, as long as the body takes: clients and proxies end a silent stream."""

    async def ping() -> None:
        with contextlib.suppress(ConnectionError):  # whoever writes the answer notices that the client is gone
            while True:
                await asyncio.sleep(interval_s)
                await (await _stream_of(request)).write(b": ping\n\n")

    task = asyncio.create_task(ping())
    try:
        yield
    finally:
        await cancel_all([task])
