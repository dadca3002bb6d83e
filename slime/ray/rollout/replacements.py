"""Engines that were lost, and others in their place (--use-fault-tolerance).

A lost engine is taken from behind its router and ended at once; the others go on, and its requests are sent again.
When the driver says that there is room, another is started in its place. It has the weights of --hf-checkpoint: one of
the trained model is put behind the router only when the trainer has sent it its own. Whoever holds handles of engines
asks `count` whether they are still those.

It does not know how a loss is noticed (engine_watch), nor when it is time to replace.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from slime.backends.sglang_utils.server_control import Worker
from slime.ray.rollout.server_group import START_DEADLINE_S, ServerGroup
from slime.ray.rollout.servers import ModelServers, RolloutServers
from slime.ray.utils import get

logger = logging.getLogger(__name__)

WATCHED = "regular"
"""Worker types that answer by themselves: a prefill or decode server needs the other, an encoder generates nothing."""


@dataclass(eq=False)
class _Seat:
    """One engine's place, whoever is in it."""

    model: ModelServers
    group: ServerGroup
    index: int
    takes_weights: bool
    worker: Worker | None
    is_lost: bool = False


class Replacements:
    """The engines of a run that can be replaced.

    Args:
        servers: all of them, which run.
        args: reads `accelerator`.
    """

    def __init__(self, servers: RolloutServers, args: Any) -> None:
        self._args = args
        self._seats: list[_Seat] = []
        self._lock = threading.Lock()
        self._waiting: list[_Seat] = []
        self.count = 0
        """How often an engine was lost or replaced."""
        for model in servers.models:
            for kind, group in model.groups:
                takes_weights = model.plan.update_weights and kind.takes_weights
                for index, engine in enumerate(group.engines if kind.worker_type == WATCHED else []):
                    worker = Worker(get(engine.contact.remote(), "the address of an engine", 60.0).url)
                    self._seats.append(_Seat(model, group, index, takes_weights, worker))

    def urls(self) -> dict[int, str]:
        """Number -> address of every engine that is there."""
        seats = enumerate(self._seats)
        return {n: seat.worker.url for n, seat in seats if seat.worker is not None and not seat.is_lost}

    def lose(self, number: int, why: str) -> None:
        """Do without an engine from now on."""
        seat = self._seats[number]
        with self._lock:
            if seat.is_lost or seat.worker is None:
                return
            seat.is_lost = True
            self.count += 1
            if seat in self._waiting:  # lost again before it served
                self._waiting.remove(seat)
            logger.error("engine at %s is lost, the others go on without it: %s", seat.worker.url, why)
            seat.model.take_from_router(seat.worker.url)
            seat.model.lost.add(seat.group.engines[seat.index])
            seat.group.end(seat.index)

    def replace(self) -> int:
        """Start an engine in each place of a lost one; returns how many, when they run.

        Raises:
            ActorFailure: one did not start.
        """
        with self._lock:
            seats = [seat for seat in self._seats if seat.is_lost]
            if not seats:
                return 0
            for seat in seats:
                seat.model.lost.discard(seat.group.engines[seat.index])
            begun = [seat.group.replace(seat.index) for seat in seats]
            deadline_s = START_DEADLINE_S[self._args.accelerator] + 60.0
            workers = get(begun, f"the start of {len(begun)} engine(s) in place of lost ones", deadline_s)
            for seat, worker in zip(seats, workers, strict=True):
                seat.worker, seat.is_lost = worker, False
            self.count += 1
            self._waiting += seats
        for seat in seats:
            if not seat.takes_weights:
                self._register(seat)
        return len(seats)

    def register(self) -> None:
        """Put new engines behind their routers: they have the trainer's weights now."""
        for seat in list(self._waiting):
            self._register(seat)

    def _register(self, seat: _Seat) -> None:
        self._waiting.remove(seat)
        if seat.worker is not None and not seat.is_lost:
            seat.model.put_behind_router(seat.worker)
            logger.warning("engine at %s takes the place of a lost one", seat.worker.url)
