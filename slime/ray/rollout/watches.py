"""The threads that look after the engines and routers of a run.

`EngineWatch` (--use-fault-tolerance) notices engines that do not answer any more; the listener decides what is done
about them. `EngineEnds` (without) says why requests fail: the engines that were to answer them have ended.
`RouterWatch` starts a router again that has ended or hangs. Nobody waits for a look of theirs but `EngineWatch.pause`
and `RouterWatch.stop`.
"""

from __future__ import annotations

import functools
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import Probe
from slime.observability.metric_utils import dict_add_prefix
from slime.processes.wait import Watch
from slime.ray.rollout.servers import ModelServers
from slime.ray.utils import ActorFailure, get
from slime.utils.errors import HttpError
from slime.utils.http.network import OUTAGES
from slime.utils.misc import group_by

logger = logging.getLogger(__name__)

SUSPICION_S = 5.0  # Between two looks at all engines that failed requests ask for.
TICK_S = 0.2  # Between two questions whether it is time for a look.
ENDING_S = 30.0
PAUSE_S = 1.0  # Between two looks at engines that have ended, which failed requests ask for.
INTERVAL_S = 0.5
ANSWER_EVERY_S = 10.0  # Between two questions to a router whose process is there.
MOST_RESTARTS = 6
HOUR_S = 3600.0
ASK_S = 3.0
LOADS_EVERY_S = 5.0
FULL = 0.9
"""Share of the KV cache in use from which on requests queue for want of it."""


class LastHour:
    """Counts what was done, and forgets it after an hour."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def count(self) -> int:
        """How often it was done within the last hour."""
        now = time.monotonic()
        while self._times and now - self._times[0] > HOUR_S:
            self._times.popleft()
        return len(self._times)

    def note(self, times: int = 1) -> None:
        """It is done now."""
        self._times.extend([time.monotonic()] * times)


class EngineWatch(Watch):
    """Notices engines that do not answer any more (--use-fault-tolerance).

    All are asked at once, every so many seconds and when a request has failed, to generate one token
    (`/health_generate`), which a server that is stuck does not do either. While they cannot be expected to (they have
    released their memory, or get new weights) the watch is paused; after that it waits before it looks again.

    Wait graph: a look waits for the engines' answers, `timeout_s` at most; nobody waits for a look but `pause`.

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
        super().__init__("engine-watch", every_s=min(TICK_S, interval_s))
        self._urls, self._on_loss = urls, on_loss
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._may_look = threading.Lock()
        self._is_paused = False
        self._quiet_until = self._next_look = 0.0

    def start(self) -> None:
        """Begin."""
        self._wait_first()
        super().start()

    def pause(self) -> None:
        """Do not look until `resume`; a look that is under way is waited for."""
        self._is_paused = True
        with self._may_look:
            pass

    def resume(self) -> None:
        """Look again, after the first wait."""
        self._wait_first()  # before: a look that is due just now sees one of the two
        self._is_paused = False

    def _wait_first(self) -> None:
        self._quiet_until = time.monotonic() + self._first_wait_s
        self._next_look = self._quiet_until + self._interval_s

    def suspect(self) -> None:
        """Look soon, in place of after the interval: a request has failed."""
        if (now := time.monotonic()) >= self._quiet_until and not self._is_paused:
            self._quiet_until, self._next_look = now + SUSPICION_S, now

    def tick(self) -> None:
        """Look, if it is time."""
        with self._may_look:
            if not self._is_paused and (now := time.monotonic()) >= self._next_look:
                self._next_look = now + self._interval_s
                self.look()

    def look(self, probe: Probe = Probe.GENERATES) -> None:
        """Ask every engine once."""
        urls = self._urls()
        if not urls:
            return
        ask = functools.partial(server_control.why_unhealthy_sync, timeout_s=self._timeout_s, probe=probe)
        with ThreadPoolExecutor(len(urls), thread_name_prefix="engine-health") as threads:
            answers = dict(zip(urls, threads.map(ask, urls.values()), strict=True))
        for number, problem in answers.items():
            if problem is not None and not self._is_over.is_set():
                self._on_loss(number, urls[number], problem)


class EngineEnds(Watch):
    """Says why requests fail without --use-fault-tolerance: the engines that were to answer them have ended.

    Their router answers "No available workers" from then on, to each request of a rollout and for as long as it is
    sent again. Once no engine of a kind is left that a model needs, its requests fail with what the engine itself has
    said. A look, whenever a request has failed, waits for the engines' actors, `ENDING_S` at most.

    Args:
        models: they run.
    """

    def __init__(self, models: Sequence[ModelServers]) -> None:
        super().__init__("engine-ends", every_s=PAUSE_S)
        self._models = models
        self._suspected = threading.Event()

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
            ours = group_by([seat for seat in model.seats if seat.external is None], lambda seat: seat.worker_type)
            by_kind = {kind: [_why_ended(seat.engine) for seat in seats] for kind, seats in ours.items()}
            found += [why for whys in by_kind.values() for why in whys if why is not None]
            is_whole = all(seat.external is None for seat in model.seats)
            if is_whole and (gone := _all_of_a_kind(by_kind.values())) and not self._is_over.is_set():
                url = model.router.address.url
                if not OUTAGES.is_on(url):
                    logger.error("the requests to model %s fail: %s", model.plan.name, gone)
                OUTAGES.begin(url)
                OUTAGES.give_up(url, gone)
        return found

    def tick(self) -> None:
        """Look, if a request has failed."""
        if self._suspected.is_set():
            self._suspected.clear()
            self.look()


def _all_of_a_kind(kinds: Any) -> str | None:
    for whys in kinds:
        if whys and all(whys):
            return str(whys[0])
    return None


def _why_ended(engine: Any) -> str | None:
    try:
        why: str | None = get(engine.ending.remote(), "the state of an engine", ENDING_S)
    except TimeoutError:
        return None  # it may be busy
    except ActorFailure as error:
        return str(error)
    return why


class RouterWatch(Watch):
    """Starts a router again, on its port, that has ended or hangs.

    Requests that it had are lost with it, and sent again by whoever sent them (`slime.utils.http_utils`); the engines
    are registered with the new one as they were with the old. A router that is not ours is not looked after. After
    `MOST_RESTARTS` in an hour none is started any more: requests then fail, which ends the run with their error.

    Wait graph: a look waits for the routers' answers, and for a new one until it answers and has its engines; nobody
    waits for a look but `stop`, and those who change the engines of a router that is being started.

    Args:
        models: they run.
    """

    def __init__(self, models: Sequence[ModelServers]) -> None:
        super().__init__("router-watch", every_s=INTERVAL_S)
        self._models = [model for model in models if model.router.is_ours]
        self._restarts = LastHour()
        self._asked = time.monotonic()
        self.count = 0  # How often a router was started again.

    def stop(self) -> None:
        """End; a router that is being started is waited for a moment."""
        super().stop()
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

    def tick(self) -> None:
        """Look, and at times ask routers whose process is there."""
        if asks := time.monotonic() - self._asked > ANSWER_EVERY_S:
            self._asked = time.monotonic()
        self.look(asks=asks)


Look = Mapping[str, Mapping[str, float]]
"""Address of each engine behind a router -> its load."""


class EngineLoads(Watch):
    """Asks every few seconds how busy engines are, for metrics of a rollout; an engine that does not tell is left out.

    Args:
        routers: their addresses; the engines behind them are asked.
    """

    def __init__(self, routers: Callable[[], Iterable[str]]) -> None:
        super().__init__("engine-loads", every_s=LOADS_EVERY_S)
        self._routers = routers
        self._lock = threading.Lock()
        self._looks: dict[str, list[Look]] = {}

    def tick(self) -> None:
        """Ask once; only what engines say while they generate is kept."""
        for router in self._routers():
            with suppress(HttpError):
                self._look(router, server_control.list_workers_sync(router, timeout_s=ASK_S))

    def _look(self, router: str, urls: Iterable[str]) -> None:
        look = {}
        for url in sorted(urls):
            with suppress(HttpError):
                look[url] = _sums(server_control.loads_sync(url, timeout_s=ASK_S))
        if any(load["running"] for load in look.values()):
            with self._lock:
                self._looks.setdefault(router, []).append(look)

    def take(self) -> dict[str, float]:
        """Return the metrics of what was seen since the last call; nothing where nothing was."""
        with self._lock:
            looks, self._looks = self._looks, {}
        return load_metrics(looks)


def _sums(ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The load of an engine: sums over its data-parallel ranks, the fullest's share of KV cache, mean cache hits."""
    ranks = list(ranks)
    sums = {"running": "num_running_reqs", "queued": "num_waiting_reqs", "tokens_per_s": "gen_throughput"}
    load = {name: float(sum(rank.get(key) or 0.0 for rank in ranks)) for name, key in sums.items()}
    load["kv_use"] = max((float(rank.get("token_usage") or 0.0) for rank in ranks), default=0.0)
    hits = [float(rank.get("cache_hit_rate") or 0.0) for rank in ranks]
    return load | {"cache_hits": statistics.fmean(hits) if hits else 0.0}


def load_metrics(seen: Mapping[str, Sequence[Look]]) -> dict[str, float]:
    """Return `rollout/engine_loads/...` of several looks at the engines behind each router.

    Means are over looks and engines; `full_ratio` is the share of the looks at the fullest engine in which requests
    queued for want of KV cache; `slowest_ratio` how many times as fast as the slowest engine the median one of the
    same model serves a request.

    Example:
        >>> load = {"running": 4.0, "queued": 0.0, "tokens_per_s": 80.0, "kv_use": 0.5, "cache_hits": 0.1}
        >>> looks = [{"a": load, "b": load | {"tokens_per_s": 20.0}}]
        >>> load_metrics({"router": looks})["rollout/engine_loads/slowest_ratio"]
        4.0
    """
    looks = [look for of_router in seen.values() for look in of_router]
    if not looks:
        return {}
    loads = [load for look in looks for load in look.values()]
    found = {name: statistics.fmean(load[name] for load in loads) for name in loads[0]}
    shares = [
        statistics.fmean(look[url]["kv_use"] >= FULL and look[url]["queued"] > 0 for look in looks if url in look)
        for url in {url for look in looks for url in look}
    ]
    found |= {"full_ratio": max(shares)}
    if ratios := [ratio for of_router in seen.values() if (ratio := _slowest_ratio(of_router))]:
        found["slowest_ratio"] = max(ratios)
    return dict_add_prefix(found, "rollout/engine_loads/")


def _slowest_ratio(looks: Sequence[Look]) -> float | None:
    """Of the engines of one model; only those with at least half as many requests as the busiest are compared, as few
    requests are faster."""
    speeds: dict[str, list[float]] = {}
    for look in looks:
        most = max(load["running"] for load in look.values())
        for url, load in look.items():
            if most and load["running"] >= most / 2:
                speeds.setdefault(url, []).append(load["tokens_per_s"] / load["running"])
    means = [statistics.fmean(values) for values in speeds.values()]
    return statistics.median_high(means) / min(means) if len(means) > 1 and min(means) > 0 else None


def engine_state(routers: Iterable[str], engines: Iterable[str]) -> dict[str, Any]:
    """Address -> its load (requests that run and wait, tokens held, ...), or why it does not tell.

    Args:
        routers: their addresses; their engines are asked, too.
        engines: addresses of engines that are known.
    """
    found: dict[str, Any] = {}
    urls = set(engines)
    for router in routers:
        try:
            urls |= set(server_control.list_workers_sync(router, timeout_s=ASK_S))
        except HttpError as error:
            found[f"router {router}"] = str(error)
        else:
            found[f"router {router}"] = "answers"
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(urls))), thread_name_prefix="engine-state") as threads:
        answers = threads.map(_load_of, sorted(urls))
        found |= {f"engine {url}": answer for url, answer in zip(sorted(urls), answers, strict=True)}
    return found


def _load_of(url: str) -> Any:
    problem = "?"
    try:
        loads = server_control.loads_sync(url, timeout_s=ASK_S)
    except HttpError as error:
        problem = str(error)
    else:
        kept = [{key: value for key, value in load.items() if key != "timestamp"} for load in loads]
        known = kept[0] if len(kept) == 1 else kept
        # The load is read from memory that the scheduler writes, and still there when it hangs.
        why = server_control.why_unhealthy_sync(url, timeout_s=ASK_S, probe=server_control.Probe.SCHEDULES)
        return known if why is None else f"its scheduler does not answer ({why}); its last load: {known}"
    with suppress(HttpError):  # an encoder reports no loads
        server_control.model_info_sync(url, timeout_s=ASK_S)
        return "answers, but tells no load"
    return problem


class DraftWatch:
    """Compares what drafts give with what they have to give, and says when they are to stop (--spec-auto-off).

    Args:
        break_even: tokens of a verification below which drafts lose; None compares nothing.
        may_stop: whether they may be stopped at all.

    Attributes:
        is_over: drafts are to stop, for good.
    """

    PATIENCE = 3  # Rollouts that lose, one after the other, before drafts stop.

    def __init__(self, break_even: float | None, *, may_stop: bool) -> None:
        self._break_even = break_even
        self._may_stop = may_stop
        self._lost = 0
        self.is_over = False

    def note(self, length: float | None) -> dict[str, float]:
        """Take the tokens that a verification gave in a rollout; None where there was none.

        Returns:
            `rollout/spec_break_even`: how much of them it takes for drafts to pay, at 1 or above they lose; and with
            --spec-auto-off `rollout/spec_drafts`: 1 while engines draft.
        """
        found = {"rollout/spec_drafts": float(not self.is_over)} if self._may_stop else {}
        if self._break_even is None or length is None or self.is_over:
            return found
        found["rollout/spec_break_even"] = self._break_even / length
        self._lost = self._lost + 1 if length < self._break_even else 0
        if self._may_stop and self._lost == self.PATIENCE:
            logger.warning(
                "drafts gave %.2f tokens a verification, less than --spec-break-even-length %g, in %d rollouts one "
                "after the other: the engines stop drafting (--spec-auto-off)",
                length, self._break_even, self._lost,
            )  # fmt: skip
            self.is_over = True
        return found
