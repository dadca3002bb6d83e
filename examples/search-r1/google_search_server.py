"""Searching with Google through serper.dev, which needs a key. Not run against the real service yet."""

from __future__ import annotations

from typing import Any

from local_search_server import SearchError, ask

SERPER_URL = "https://google.serper.dev/search"


async def google_search(
    api_key: str,
    query: str,
    top_k: int = 5,
    timeout: float = 60,
    proxy: str | None = None,
    snippet_only: bool = True,
    *,
    url: str = SERPER_URL,
) -> list[dict[str, Any]]:
    """The first results: `[{"document": {"contents": '"Title"\\nsnippet'}}, ...]`.

    Args:
        snippet_only: must be True: pages behind results are not fetched.

    Raises:
        SearchError: the service did not answer, or not with results.
        ValueError: there is no key, or pages are asked for.
    """
    if not api_key or not snippet_only:
        raise ValueError("google search needs search_r1: {google: {api_key: KEY}} and gives snippets only")
    body = {"q": query, "num": top_k, "gl": "us", "hl": "en"}
    answer = await ask(url, body, timeout_s=timeout, proxy=proxy, headers={"X-API-KEY": api_key})
    try:
        hits = answer.get("organic", [])[:top_k]
        texts = [f'"{hit.get("title", "No title.")}"\n{hit.get("snippet", "No snippet available.")}' for hit in hits]
    except (AttributeError, TypeError) as error:
        raise SearchError(f"serper.dev answered {str(answer)[:200]!r}, which has no results") from error
    return [{"document": {"contents": text}} for text in texts]
