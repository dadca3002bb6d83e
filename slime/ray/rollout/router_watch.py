"""Looks after the routers of a run in a thread: one that has ended, or hangs, is started again on its port.

Requests that it had are lost with it, and sent again by whoever sent them (`slime.utils.http_utils`); the engines are
put behind the new one as they were behind the old. A router of somebody else's is not looked after. After
`MOST_RESTARTS` in an hour none is started any more: requests then fail, which ends the run with their error.

Wait graph: a look waits for the routers' answers, and for a new one until it answers and has its engines; nobody waits
for a look but `stop`, and those who change the engines behind a router that is being started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from slime.ray.rollout.hourly import LastHour
from slime.ray.rollout.servers import ModelServers

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
ANSWER_EVERY_S = 10.0
"""Between two questions to a router whose process is there."""
MOST_RESTARTS = 6


class RouterWatch:
    """A watch over the routers of some models.

    Args:
        models: they run.
    """

    def __init__(self, models: Sequence[ModelServers]) -> None:
        self._models = [model for model in models if model.router.is_ours]
        self._is_over = threading.Event()
        self._restarts = LastHour()
        self.count = 0
        """How often a router was started again."""
        self._thread = threading.Thread(target=self._run, name="router-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a router that is being started is waited for a moment."""
        self._is_over.set()
        self._thread.join(timeout=ANSWER_EVERY_S)

    def look(self, *, asks: bool = True) -> None:
        """Start the routers again that are not there; with `asks`, those too that do not answer."""
        for model in self._models:
            why = model.router.what_is_wrong(asks=asks)
            if why is not None and not self._is_over.is_set():
                self._restart(model, why)

    def _restart(self, model: ModelServers, why: str) -> None:
        now = time.monotonic()
        url = model.router.address.url
        if self._restarts.count() >= MOST_RESTARTS:
            logger.error("the router %s %s; it was started %d times in an hour, no more", url, why, MOST_RESTARTS)
            self._models.remove(model)
            return
        self._restarts.note()
        logger.error("the router %s %s; it is started again", url, why)
        count = model.restart_router()
        self.count += 1
        logger.warning("the router %s is back with %d engine(s), after %.1f s", url, count, time.monotonic() - now)

    def _run(self) -> None:
        asked = time.monotonic()
        while not self._is_over.wait(INTERVAL_S):
            asks = time.monotonic() - asked > ANSWER_EVERY_S
            try:
                self.look(asks=asks)
            except Exception:  # noqa: BLE001 - a watch that fails must not leave the routers unwatched
                logger.exception("a router could not be started again")
            if asks:
                asked = time.monotonic()
