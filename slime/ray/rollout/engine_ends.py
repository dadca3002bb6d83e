"""Says why requests fail without --use-fault-tolerance: the engines that were to answer them have ended.

Their router answers "No available workers" from then on, to each request of a rollout and for as long as it is sent
again. Once no engine of a kind is left that a model needs, its requests fail with what the engine itself has said.

Wait graph: a look waits for the engines' actors, `ASK_S` at most; nobody waits for a look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from slime.ray.rollout.servers import ModelServers
from slime.ray.utils import ActorFailure, get
from slime.utils.outages import OUTAGES

logger = logging.getLogger(__name__)

ASK_S = 30.0
PAUSE_S = 1.0
"""Between two looks that failed requests ask for."""


class EngineEnds:
    """A look at the engines of some models whenever a request has failed.

    Args:
        models: they run.
    """

    def __init__(self, models: Sequence[ModelServers]) -> None:
        self._models = models
        self._suspected, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-ends", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End: engines end after this."""
        self._is_over.set()

    def suspect(self, _url: str) -> None:
        """Look soon: a request has failed."""
        self._suspected.set()

    def look(self) -> list[str]:
        """Have the requests of models fail that have no engine of some kind any more.

        Returns:
            of each engine that has ended, that and why.
        """
        found = []
        for model in self._models:
            by_kind: dict[str, list[str | None]] = {}
            for kind, group in model.groups:
                by_kind.setdefault(kind.worker_type, []).extend(_why_ended(engine) for engine in group.engines)
            found += [why for whys in by_kind.values() for why in whys if why is not None]
            if not model.external and (gone := _all_of_a_kind(by_kind.values())) and not self._is_over.is_set():
                url = model.router.address.url
                if not OUTAGES.is_on(url):
                    logger.error("the requests to model %s fail: %s", model.plan.name, gone)
                OUTAGES.begin(url)
                OUTAGES.give_up(url, gone)
        return found

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            if self._suspected.is_set():
                self._suspected.clear()
                try:
                    self.look()
                except Exception:  # noqa: BLE001 - a thread's boundary: the requests then fail as they do by themselves
                    logger.exception("a look at the engines failed")


def _all_of_a_kind(kinds: Any) -> str | None:
    for whys in kinds:
        if whys and all(whys):
            return str(whys[0])
    return None


def _why_ended(engine: Any) -> str | None:
    try:
        why: str | None = get(engine.ending.remote(), "the state of an engine", ASK_S)
    except TimeoutError:
        return None  # it may be busy
    except ActorFailure as error:
        return str(error)
    return why
