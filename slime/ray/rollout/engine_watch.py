"""Looks after engines in a thread: which of them do not answer any more (--use-fault-tolerance).

All are asked at once, every so many seconds and when a request has failed, to generate one token (`/health_generate`),
which a server that is stuck does not do either. While they cannot be expected to (they have released their memory, or
get new weights) the watch is paused; after that it waits before it looks again. The listener decides what is done
about a lost engine.

Wait graph: a look waits for the engines' answers, `timeout_s` at most; nobody waits for a look but `pause`, which
returns when none is under way.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import Probe

logger = logging.getLogger(__name__)

SUSPICION_S = 5.0
"""Between two looks that failed requests ask for."""


class EngineWatch:
    """A watch over engines.

    Args:
        urls: at each look, number -> address of every engine to look at.
        on_loss: called in the watch's thread with the number and the address of one that did not answer, and what
            happened; by then another may have taken its place.
        interval_s: between two looks.
        timeout_s: for an answer.
        first_wait_s: without a look after `resume`.
    """

    def __init__(
        self,
        urls: Callable[[], Mapping[int, str]],
        on_loss: Callable[[int, str, str], None],
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
        self._is_suspected = False
        self._quiet_until = 0.0
        self._changed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._quiet_until = time.monotonic() + self._first_wait_s
        self._thread.start()

    def pause(self) -> None:
        """Look no more until `resume`; a look that is under way is waited for."""
        self._is_paused = True
        with self._may_look:
            pass

    def resume(self) -> None:
        """Go on, after the first wait."""
        self._quiet_until = time.monotonic() + self._first_wait_s
        self._changed.set()  # first: a look that is due just now sees one of the two
        self._is_paused = False

    def suspect(self) -> None:
        """Look soon, in place of after the interval: a request has failed."""
        if time.monotonic() >= self._quiet_until and not self._is_paused:
            self._quiet_until = time.monotonic() + SUSPICION_S
            self._is_suspected = True
            self._changed.set()

    def stop(self) -> None:
        """End; what a look that is under way still finds is told nobody: engines end after their watch."""
        self._is_over = True
        self._changed.set()

    def look(self, probe: Probe = Probe.GENERATES) -> None:
        """Ask every engine once."""
        urls = self._urls()
        if not urls:
            return
        ask = functools.partial(server_control.why_unhealthy_sync, timeout_s=self._timeout_s, probe=probe)
        with ThreadPoolExecutor(len(urls), thread_name_prefix="engine-health") as threads:
            answers = dict(zip(urls, threads.map(ask, urls.values()), strict=True))
        for number, problem in answers.items():
            if problem is not None and not self._is_over:
                self._on_loss(number, urls[number], problem)

    def _run(self) -> None:
        wait_s = self._first_wait_s + self._interval_s
        while not self._is_over:
            is_changed = self._changed.wait(wait_s)
            is_suspected, self._is_suspected = self._is_suspected, False
            if is_changed:
                self._changed.clear()
            if is_changed and not is_suspected:
                wait_s = self._first_wait_s + self._interval_s
                continue
            wait_s = self._interval_s
            with self._may_look:
                if not (self._is_paused or self._is_over or self._changed.is_set()):
                    try:
                        self.look()
                    except Exception:  # noqa: BLE001 - a watch that fails must not leave the engines unwatched
                        logger.exception("a look at the engines failed")
