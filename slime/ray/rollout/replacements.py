"""Engines that were lost, and others in their place (--use-fault-tolerance).

A lost engine is taken from behind its router and ended at once; the others go on, and its requests are sent again.
Where there is no other, requests to its router wait (`slime.utils.http.network`) until one serves. When the driver
says that there is room, another is started in its place, but only so many in an hour: an engine that is lost again and
again would cost more than it gives. An external engine is not ours to end or to start: it is taken back when it
answers again. Whoever is new has other weights than the trainer's: an engine of the trained model is put behind the
router only when the trainer has sent it its own. Whoever holds handles of engines asks `count` whether they are still
those.

`EngineWatch` notices a loss; the driver decides when it is time to replace.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import Probe, Worker
from slime.config.args import Args
from slime.processes.wait import WaitTimeout, wait
from slime.ray.rollout.server_group import START_DEADLINE_S
from slime.ray.rollout.servers import ModelServers, RolloutServers, Seat
from slime.ray.rollout.watches import EngineWatch, LastHour
from slime.ray.utils import ActorFailure, get
from slime.utils.errors import HttpError, UsageError
from slime.utils.http.api_keys import protect_engine
from slime.utils.http.network import OUTAGES

logger = logging.getLogger(__name__)

# Worker types that answer by themselves: a prefill or decode server needs the other, an encoder generates nothing.
WATCHED = "regular"

PLACE_S = 30.0  # For Ray to find other slots than those of a lost node, which it notices after 15 s.
EXTERNAL_S = 60.0  # For the last engine of a model to answer again where it is somebody else's.
RETRY_S = 5.0  # Between two tries to start the only engine of a model.
LOOK_S = 5.0
START_MARGIN_S = 60.0


class Replacements:
    """The engines of a run that can be replaced, or taken back.

    Args:
        servers: all of them, which run.
        args: reads `accelerator`, `rollout_health_check_*`, `max_engine_restarts_per_hour`.

    Attributes:
        watch: which notices that an engine is lost; started by the owner.
    """

    def __init__(self, servers: RolloutServers, args: Args) -> None:
        self._args = args
        self._lock = threading.Lock()
        self._waiting: list[Seat] = []
        self._started = LastHour()
        self._is_spent = False
        self._last_failure = ""
        self.count = 0  # How often an engine was lost or replaced.
        kinds = ("rollout/engines_lost", "rollout/engines_replaced", "rollout/engines_joined", "rollout/engines_left")
        self.counts = dict.fromkeys(kinds, 0.0)
        self._at_the_door: list[Seat] = []  # Guests, until the driver lets them in.
        self._models = servers.models
        self.watch = EngineWatch(
            self.urls,
            self.lose,
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
            first_wait_s=args.rollout_health_check_first_wait,
        )

    @property
    def _seats(self) -> list[Seat]:
        """Every place that is watched."""
        return [seat for model in self._models for seat in model.seats if seat.worker_type == WATCHED]

    def urls(self) -> dict[int, str]:
        """Number -> address of every engine that is there."""
        seats = enumerate(self._seats)
        return {n: seat.worker.url for n, seat in seats if seat.worker is not None and not seat.is_lost}

    def metrics(self) -> dict[str, float]:
        """Engines that serve now; losses and replacements since the start."""
        serving = len(self.urls()) - len(self._waiting)
        return {"rollout/engines": float(serving), **self.counts}

    # ---- guests (--elastic-rollout)

    def join(self, seat: Seat) -> None:
        """Have a guest wait until the driver lets it in (`admit`)."""
        with self._lock:
            self._at_the_door.append(seat)

    def admit(self) -> list[Any]:
        """Let guests in, which get weights from now on.

        Only the driver says when: an engine that came between the sending of weights and `register` would serve
        without them.

        Returns:
            every engine that takes the trainer's weights and has none yet.
        """
        with self._lock:
            guests, self._at_the_door = self._at_the_door, []
            for seat in guests:
                seat.model.seats.append(seat)
            self.count += len(guests)
            self.counts["rollout/engines_joined"] += len(guests)
            self._waiting += guests
            return [seat.engine for seat in self._waiting if seat.takes_weights and not seat.is_lost]

    def leave(self, url: str) -> None:
        """Send a guest no more requests, and no more weights; those that it has go on."""
        with self._lock:
            if (seat := self._guest_at(url)) in self._at_the_door:
                self._at_the_door.remove(seat)
            elif seat is not None:
                self._show_out(seat)
                logger.warning("engine at %s leaves; %d engine(s) stay", url, len(self.urls()))

    def is_waiting(self, url: str) -> bool | None:
        """Whether a guest waits for its weights; None where it is not here (any more)."""
        with self._lock:
            seat = self._guest_at(url)
            return None if seat is None else seat in self._at_the_door or seat in self._waiting

    def _guest_at(self, url: str) -> Any:
        guests = [seat for seat in [*self._at_the_door, *self._seats] if seat.is_guest]
        return next((seat for seat in guests if seat.worker and seat.worker.url == url), None)

    def _show_out(self, seat: Seat) -> None:
        assert seat.worker is not None
        self.count += 1
        self.counts["rollout/engines_left"] += 1
        self._waiting = [other for other in self._waiting if other is not seat]
        model = seat.model
        model.seats.remove(seat)
        if model in self.without_engine():
            OUTAGES.begin(model.router.address.url)
        model.take_from_router(seat.worker.url)

    # ---- losses

    def lose(self, number: int, url: str, why: str) -> None:
        """Do without an engine from now on, unless another has taken its place since it was asked at this address."""
        for seat in self._seats[number : number + 1]:
            self._lose(seat, why, url=url)

    def lose_engine(self, engine: Any, why: str) -> bool:
        """As `lose`, of an engine by its handle; returns whether it is one that can be replaced."""
        seats = [seat for seat in self._seats if seat.engine is engine]
        for seat in seats:
            self._lose(seat, why)
        return bool(seats)

    def without_engine(self) -> list[ModelServers]:
        """The models of which no engine serves any more."""
        models = {id(seat.model): seat.model for seat in self._seats}.values()
        return [model for model in models if not any(self._serves(seat) for seat in self._seats_of(model))]

    def hold_requests(self) -> None:
        """Have the requests of every model wait until `register`: engines are to release their memory."""
        for model in self._models:
            OUTAGES.begin(model.router.address.url)

    def _seats_of(self, model: ModelServers) -> list[Seat]:
        return [seat for seat in self._seats if seat.model is model]

    def _serves(self, seat: Seat) -> bool:
        return seat.worker is not None and not seat.is_lost and seat not in self._waiting

    def _lose(self, seat: Seat, why: str, *, url: str | None = None) -> None:
        with self._lock:
            if seat.is_lost or seat.worker is None or url not in (None, seat.worker.url):
                return
            seat.is_lost = True
            self.count += 1
            self.counts["rollout/engines_lost"] += 1
            if seat in self._waiting:  # lost again before it served
                self._waiting.remove(seat)
            if seat.is_guest:
                logger.error("engine at %s, which had joined, is lost: %s", seat.worker.url, why)
                self._show_out(seat)
                return
            if any(self._serves(other) for other in self._seats_of(seat.model)):
                logger.error("engine at %s is lost, the others go on without it: %s", seat.worker.url, why)
            else:
                text = "engine at %s is lost, the last of model %s, whose requests wait for another in its place: %s"
                logger.error(text, seat.worker.url, seat.model.plan.name, why)
                OUTAGES.begin(seat.model.router.address.url)
            if seat.is_behind_router:
                seat.model.take_from_router(seat.worker.url)
            if seat.group is not None:
                seat.group.end(seat.index)

    def replace(self) -> int:
        """Start an engine in each place of a lost one, and take back external ones that answer; returns how many.

        Where a model has no other engine, it is tried as often as --max-engine-restarts-per-hour allows.

        Raises:
            ActorFailure, TimeoutError, UsageError: a model has no engine any more; its requests fail from now on.
        """
        replaced = 0
        try:
            while True:
                with self._lock:
                    seats = self._fill_places()
                replaced += len(seats)
                for seat in seats:
                    if not seat.takes_weights:
                        self._register(seat)
                if not (empty := self._empty_models()):
                    return replaced
                self._check_another_try(empty[0])
                time.sleep(RETRY_S)
        except (ActorFailure, TimeoutError, UsageError) as error:
            for model in self.without_engine():
                OUTAGES.give_up(model.router.address.url, str(error))
            raise

    def _empty_models(self) -> list[ModelServers]:
        """The models that have no engine, not even one that waits for weights."""
        return [model for model in self.without_engine() if all(seat.is_lost for seat in self._seats_of(model))]

    def _check_another_try(self, model: ModelServers) -> None:
        """Raise ActorFailure where trying again gives this model no engine."""
        name, last = model.plan.name, self._last_failure and f"; the last one did not: {self._last_failure}"
        if all(seat.external is not None for seat in self._seats_of(model)):
            raise ActorFailure(f"no engine of model {name} is left: none has answered for {EXTERNAL_S:.0f} s")
        if self._is_spent:
            raise ActorFailure(
                f"no engine of model {name} is left, and no more may be started in place of lost ones within an hour "
                f"(--max-engine-restarts-per-hour {self._args.max_engine_restarts_per_hour}){last}"
            )

    def _fill_places(self) -> list[Seat]:
        """Try once to have an engine in each place of a lost one; returns the places where one is now."""
        lost = [seat for seat in self._seats if seat.is_lost]
        seats = self._that_answer([seat for seat in lost if seat.external is not None])
        seats += self._start([seat for seat in lost if seat.external is None])
        if seats:
            self.count += 1
            self.counts["rollout/engines_replaced"] += len(seats)
            self._waiting += seats
        return seats

    def _that_answer(self, lost: list[Seat]) -> list[Seat]:
        """Take back those of external engines that answer again; where a model has no other, they are waited for."""
        if any(not self._has_others(seat) for seat in lost):
            with suppress(WaitTimeout):
                what = "an external engine to answer again"
                wait(what, EXTERNAL_S, lambda: any(map(self._answers, lost)), interval_s=1.0)
        back = [seat for seat in lost if self._answers(seat)]
        for seat in back:
            seat.is_lost = False
        return back

    def _answers(self, seat: Seat) -> bool:
        assert seat.worker is not None
        timeout_s = self._args.rollout_health_check_timeout
        # not to generate: it may be paused, by a weight sync in which it was lost
        why = server_control.why_unhealthy_sync(seat.worker.url, timeout_s=timeout_s, probe=Probe.SCHEDULES)
        return why is None

    def _start(self, lost: list[Seat]) -> list[Seat]:
        """Start engines in these places, as far as that may be done in this hour; returns those where one serves."""
        seats = sorted(self._that_have_slots(lost), key=self._has_others)  # first where there is none
        seats = seats[: self._may_start(len(seats))]
        deadline_s = START_DEADLINE_S[self._args.accelerator] + START_MARGIN_S
        end, begun = time.monotonic() + deadline_s, []
        for seat in seats:
            assert seat.group is not None
            begun.append(seat.group.replace(seat.index))
        failed: list[tuple[Seat, Exception]] = []
        for seat, starting in zip(seats, begun, strict=True):
            try:
                seat.worker = self._wait_started(seat, starting, end)
                protect_engine(seat.worker.url)  # it is asked before it is registered with its router
                seat.is_lost = False
            except (ActorFailure, TimeoutError, UsageError) as error:
                failed.append((seat, error))
        self._do_without(failed)
        return [seat for seat in seats if not seat.is_lost]

    def _that_have_slots(self, lost: list[Seat]) -> list[Seat]:
        """Those whose slots are there, after a while in which Ray may find others; a second time nobody waits."""
        groups = {seat: seat.group for seat in lost if seat.group is not None and self._has_others(seat)}

        def missing() -> list[Seat]:
            return [seat for seat, group in groups.items() if not group.is_placed(seat.index)]

        def is_enough() -> bool:
            return all(seat.was_without_slots for seat in missing())

        if groups:
            try:
                wait("the slots of lost engines", PLACE_S, is_enough, interval_s=1.0)
            except WaitTimeout:
                urls = [str(seat.worker and seat.worker.url) for seat in missing()]
                logger.error(
                    "no room for %d engine(s) in place of lost ones (%s) within %.0f s: their nodes are gone and no "
                    "other has free slots; the places stay empty until there are some, the others go on",
                    len(urls), ", ".join(urls), PLACE_S,
                )  # fmt: skip
        without = missing()
        for seat in lost:
            seat.was_without_slots = seat in without
        return [seat for seat in lost if seat not in without]

    def _wait_started(self, seat: Seat, starting: Any, end: float) -> Worker:
        """Wait for an engine until `end`; where others serve, no longer than Ray has slots for it."""
        assert seat.group is not None
        what, gone_since = "the start of an engine in place of a lost one", None
        while True:
            try:
                return get(starting, what, min(LOOK_S, max(0.1, end - time.monotonic())))
            except TimeoutError:
                now = time.monotonic()
                if now >= end:
                    raise TimeoutError(f"{what} took too long: its log says why") from None
                is_gone = self._has_others(seat) and not seat.group.is_placed(seat.index)
                gone_since = (gone_since or now) if is_gone else None
                if gone_since is not None and now - gone_since >= PLACE_S:
                    raise TimeoutError(f"{what}: its node is gone, and no other has free slots") from None

    def _has_others(self, seat: Seat) -> bool:
        return any(other.model is seat.model and not other.is_lost for other in self._seats)

    def _do_without(self, failed: Sequence[tuple[Seat, Exception]]) -> None:
        """End engines that did not start; raises the reason where a model has no other and it would come again."""
        for seat, error in failed:
            assert seat.group is not None and seat.worker is not None
            has_others = self._has_others(seat)
            if not (has_others or isinstance(error, ActorFailure)):
                raise error
            seat.group.end(seat.index)
            self._last_failure = str(error)
            logger.error(
                "no engine takes the place of the lost one at %s, %s: %s",
                seat.worker.url,
                "the others go on without it and it is tried again after the next rollout"
                if has_others
                else "it is tried again",
                error,
            )

    def _may_start(self, wanted: int) -> int:
        most = self._args.max_engine_restarts_per_hour
        allowed = min(wanted, most - self._started.count())
        self._started.note(allowed)
        if allowed < wanted and not self._is_spent:
            logger.error(
                "%d engine(s) were started in place of lost ones within an hour (--max-engine-restarts-per-hour %d): "
                "no more for now, %d place(s) stay empty",
                self._started.count(), most, wanted - allowed,
            )  # fmt: skip
        self._is_spent = allowed < wanted
        return allowed

    def register(self) -> None:
        """Register new engines with their routers: they have the trainer's weights now; requests continue."""
        for seat in list(self._waiting):
            self._register(seat)
        for model in self._models:
            if model not in self.without_engine():
                OUTAGES.end(model.router.address.url)

    def _register(self, seat: Seat) -> None:
        with self._lock:
            if seat not in self._waiting or seat.worker is None or seat.is_lost:
                return  # it has left, or was lost, meanwhile
            self._waiting.remove(seat)
        try:
            if seat.is_behind_router:
                seat.model.put_behind_router(seat.worker)
        except (HttpError, WaitTimeout) as error:
            self._lose(seat, f"its router does not take it: {error}")
            return
        if seat not in self._seats:  # it has left meanwhile
            seat.model.take_from_router(seat.worker.url)
            return
        what = "has joined, and serves" if seat.is_guest else "takes the place of a lost one"
        logger.warning("engine at %s %s", seat.worker.url, what)
        OUTAGES.end(seat.model.router.address.url)
