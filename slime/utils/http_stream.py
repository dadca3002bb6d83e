"""Answers that arrive piece by piece: server-sent events over the shared HTTP client.

It does not know what an event means.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from slime.utils import http_utils
from slime.utils.api_keys import headers_for
from slime.utils.errors import HttpError
from slime.utils.outages import OUTAGES


async def stream_events(url: str, payload: Any, headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
    """POST JSON and yield the parsed JSON of each server-sent event, until "[DONE]" or the end of the answer.

    Nothing is retried: what was received so far, only the caller knows. The end of an outage is waited for.

    Raises:
        HttpError: a 4xx or 5xx answer (`status` says which), the connection broke, or an outage will not end (`status`
            is None).
    """
    body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    accepts = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    headers = {**accepts, **headers_for(url), **(headers or {})}
    await OUTAGES.over(url)
    try:
        async with http_utils.shared_session().post(url, data=body, headers=headers) as answer:
            if answer.status >= 400:
                if answer.status >= 500:
                    OUTAGES.suspect(url)
                text = (await answer.read()).decode(errors="replace")[:2000]
                raise HttpError(f"POST {url} was refused: HTTP {answer.status}: {text}", status=answer.status)
            pending: list[bytes] = []
            async for chunk in answer.content.iter_any():  # lines may be longer than aiohttp's own limit of a line
                pending.append(chunk)
                if b"\n" not in chunk:
                    continue
                *lines, rest = b"".join(pending).split(b"\n")
                pending = [rest]
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:"):
                        continue
                    if data == b"[DONE]":
                        return
                    yield orjson.loads(data)
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
        OUTAGES.suspect(url)
        raise HttpError(f"POST {url} broke off: {type(error).__name__}: {error}") from error
