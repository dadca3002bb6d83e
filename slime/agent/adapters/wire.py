"""Wire formats that the protocols share: contents as text, session keys of a request, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from slime.utils.async_utils import cancel_all

_STREAM = web.RequestKey("event_stream", web.StreamResponse)
_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image", "image_url", "input_image")
Event = tuple[str | None, Any]


class BadRequest(ValueError):
    """A body that cannot be answered; the client reads the message with status 400."""


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


def new_id(prefix: str, num_hex: int = 24) -> str:
    """A random id."""
    return prefix + secrets.token_hex(num_hex // 2)


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


def error_response(status: int, kind: str, message: str) -> web.Response:
    """An error as both protocols have it."""
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


async def send_events(request: web.Request, events: Iterable[Event]) -> web.StreamResponse:
    """Write events, (name or None, text or what JSON can show), and end the stream."""
    stream = await _stream_of(request)
    for name, data in events:
        head = f"event: {name}\n".encode() if name else b""
        await stream.write(
            head + b"data: " + (data.encode() if isinstance(data, str) else json.dumps(data).encode()) + b"\n\n"
        )
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
