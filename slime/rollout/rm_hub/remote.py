"""A reward computed by an HTTP service.

It knows the request's three fields and how often to try; the response's JSON is the reward as it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from argparse import Namespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slime.utils.types import Sample

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
TOTAL_TIMEOUT_S = 120.0
MAX_BACKOFF_S = 30.0

# A session belongs to the event loop it was made in; it goes with its loop.
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


def _session() -> aiohttp.ClientSession:
    import aiohttp  # a fifth of a second that only runs with a reward service pay

    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=TOTAL_TIMEOUT_S),
        )
        _sessions[loop] = session
    return session


def backoff_s(attempt: int) -> float:
    """Seconds to wait after the failed attempt number `attempt` (from 0), with jitter so that tries do not align."""
    return min(2.0**attempt, MAX_BACKOFF_S) + random.random()


async def remote_rm(args: Namespace, sample: Sample, max_retries: int = 10) -> Any:
    """POST prompt, response and label to `args.rm_url` and return the answer's JSON.

    Server and connection errors are tried again, `max_retries` times in all.

    Raises:
        RuntimeError: the service refused the request (4xx, at once, with its text) or every try failed.
    """
    import aiohttp

    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(max_retries):
        try:
            async with _session().post(args.rm_url, json=payload) as answer:
                if 400 <= answer.status < 500:
                    text = (await answer.text())[:500]
                    raise RuntimeError(f"the reward service {args.rm_url} answered {answer.status}: {text}")
                answer.raise_for_status()
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if attempt == max_retries - 1:
                raise RuntimeError(
                    f"the reward service {args.rm_url} (--rm-url) failed {max_retries} times, last: {error!r}"
                ) from error
            logger.warning("reward service %s, try %d of %d: %r", args.rm_url, attempt + 1, max_retries, error)
            await asyncio.sleep(backoff_s(attempt))
    raise ValueError(f"max_retries must be at least 1, got {max_retries}")
