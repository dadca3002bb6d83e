"""Servers behind which nothing answers for a while: requests to them wait, in place of failing again and again.

Whoever replaces what is lost says when the outage of a server begins, ends, or will not end; whoever sends requests
asks (`slime.utils.http_utils`). Servers are known by scheme, host and port.

Wait graph: `over` waits until the outage ends or is given up, `DEADLINE_S` at most.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from slime.utils.errors import HttpError

logger = logging.getLogger(__name__)

# As long as a rollout may take: an engine may be lost while the trainer, whose weights another needs, works.
DEADLINE_S = 24 * 3600.0


class Outages:
    """The outages that this process knows of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, Future[str | None]] = {}
        self._ended_at: dict[str, float] = {}
        self._listener: Callable[[str], None] | None = None

    def begin(self, url: str) -> None:
        """Have requests to this server wait; nothing changes where they wait already."""
        with self._lock:
            if (end := self._ends.get(origin(url))) is None or end.done():
                self._ends[origin(url)] = Future()

    def end(self, url: str) -> None:
        """Have them go on."""
        self._finish(url, None)

    def give_up(self, url: str, why: str) -> None:
        """Have them fail, those that come later, too."""
        self._finish(url, why)

    def _finish(self, url: str, why: str | None) -> None:
        with self._lock:
            end = self._ends.get(origin(url))
            if why is None and self._ends.pop(origin(url), None) is not None:
                self._ended_at[origin(url)] = time.monotonic()
        if end is not None and not end.done():
            end.set_result(why)

    def is_on(self, url: str) -> bool:
        """Whether requests to this server wait, or fail at once."""
        return bool(self._ends) and origin(url) in self._ends

    def may_end(self, url: str) -> bool:
        """Whether requests to this server wait."""
        return bool(self._ends) and (end := self._ends.get(origin(url))) is not None and not end.done()

    def has_hit(self, url: str, since: float) -> bool:
        """Whether a request that was sent `since` (of `time.monotonic`) fell into an outage, so that `over` has more
        to say than its own failure."""
        return self.is_on(url) or self._ended_at.get(origin(url), -1.0) >= since

    async def over(self, url: str) -> bool:
        """Wait for the end of an outage; returns whether there was one.

        Raises:
            HttpError: it will not end.
        """
        if not self._ends or (end := self._ends.get(origin(url))) is None:
            return False
        # shielded: one request that is cancelled must not end the wait of the others
        why = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(end)), DEADLINE_S)
        if why is not None:
            raise HttpError(f"{url} has no engine any more: {why}")
        return True

    def listen(self, listener: Callable[[str], None] | None) -> None:
        """Have this called with the address of each request that has failed; it must not block."""
        self._listener = listener

    def suspect(self, url: str) -> None:
        """Say that a request was not answered as it should be."""
        if self._listener is not None:
            self._listener(url)


def origin(url: str) -> str:
    """Scheme, host and port of an address.

    Example:
        >>> origin("http://10.0.0.1:30000/generate")
        'http://10.0.0.1:30000'
    """
    return "/".join(url.split("/", 3)[:3])


OUTAGES = Outages()  # Of this process.
