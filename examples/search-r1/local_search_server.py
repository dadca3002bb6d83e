"""Asking the retrieval server of `local_dense_retriever/retrieval_server.py`, or another one of the same fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

ANSWER_BYTES = 4 << 20
TRIES = 3


class SearchError(RuntimeError):
    """The search service did not answer, or not with what was asked for: no fault of the model."""


async def local_search(
    search_url: str, query: str, top_k: int = 5, timeout: float = 60, proxy: str | None = None
) -> list[dict[str, Any]]:
    """The best documents for a query, best first: `[{"document": {"id", "contents"}, "score"}, ...]`.

    Args:
        timeout: seconds that all tries together may take.

    Raises:
        SearchError: no answer in time, or one of another form.
    """
    asked = {"queries": [query], "topk": top_k, "return_scores": True}
    answer = await ask(search_url, asked, timeout_s=timeout, proxy=proxy)
    try:
        return [{"document": dict(hit["document"]), "score": hit["score"]} for hit in answer["result"][0]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SearchError(f"{search_url} answered {str(answer)[:200]!r}, which has no result: {error!r}") from error


async def ask(
    url: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    proxy: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """POST JSON and return the JSON that is answered; a failure is tried again twice, after a pause.

    Raises:
        SearchError: no JSON of at most `ANSWER_BYTES` was answered within `timeout_s`.
    """
    last: Exception | None = None
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            for pause_s in (*(0.2 * 5**number for number in range(TRIES - 1)), None):
                try:
                    async with session.post(url, json=body, proxy=proxy, headers=headers) as answer:
                        answer.raise_for_status()
                        return json.loads(await _bounded(answer))
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    last = error
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
    except TimeoutError:
        raise SearchError(f"{url} did not answer within {timeout_s:g} s; last failure: {last!r}") from last
    raise SearchError(f"{url} failed {TRIES} times: {last!r}") from last


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > ANSWER_BYTES:
            raise ValueError(f"the answer has more than {ANSWER_BYTES} bytes")
    return bytes(data)
