"""Looks after engines in a thread: which of them do not answer any more (--use-fault-tolerance).

All are asked at once, every so many seconds, to generate one token (`/health_generate`), which a server that is stuck
does not do either. While they cannot be expected to (they have released their memory, or get new weights) the watch is
paused; after that it waits before it looks again. What is done about a lost engine is its listener's business.

Wait graph: a look waits for the engines' answers, `timeout_s` at most; nobody waits for a look but `pause`, which
returns when none is under way.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from slime.backends.sglang_utils import server_control

logger = logging.getLogger(__name__)


class EngineWatch:
    """A watch over engines.

    Args:
        urls: at each look, number -> address of every engine to look at.
        on_loss: called in the watch's thread with the number of one that did not answer, and what happened.
        interval_s: between two looks.
        timeout_s: for an answer.
        first_wait_s: without a look after `resume`.
    """

    def __init__(
        self,
        urls: Callable[[], Mapping[int, str]],
        on_loss: Callable[[int, str], None],
        *,
        interval_s: float,
        timeout_s: float,
        first_wait_s: float,
    ) -> None:
        self._urls = urls
        self._on_loss = on_loss
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._first_wait_s = first_wait_s
        self._may_look = threading.Lock()
        self._is_paused = False
        self._changed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def pause(self) -> None:
        """Look no more until `resume`; a look that is under way is waited for."""
        self._is_paused = True
        with self._may_look:
            pass

    def resume(self) -> None:
        """Go on, after the first wait."""
        self._changed.set()  # first: a look that is due just now sees one of the two
        self._is_paused = False

    def stop(self) -> None:
        """End; what a look that is under way still finds is told nobody: engines end after their watch."""
        self._is_over = True
        self._changed.set()

    def look(self, *, generates: bool = True) -> None:
        """Ask every engine once: to generate, or only (which one without memory can do, too) to answer."""
        urls = self._urls()
        if not urls:
            return
        ask = functools.partial(server_control.why_unhealthy_sync, timeout_s=self._timeout_s, generates=generates)
        with ThreadPoolExecutor(len(urls), thread_name_prefix="engine-health") as threads:
            answers = dict(zip(urls, threads.map(ask, urls.values()), strict=True))
        for number, problem in answers.items():
            if problem is not None and not self._is_over:
                self._on_loss(number, problem)

    def _run(self) -> None:
        wait_s = self._first_wait_s + self._interval_s
        while not self._is_over:
            if self._changed.wait(wait_s):
                self._changed.clear()
                wait_s = self._first_wait_s + self._interval_s
                continue
            wait_s = self._interval_s
            with self._may_look:
                if not (self._is_paused or self._is_over or self._changed.is_set()):
                    try:
                        self.look()
                    except Exception:  # noqa: BLE001 - a watch that fails must not leave the engines unwatched
                        logger.exception("a look at the engines failed")
