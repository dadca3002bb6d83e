"""The engines of a run as the rollout manager's process has them: started, watched, replaced, and their memory moved.

The driver asks for each of these (slime.ray.engine_upkeep, `GpuTurns`); `RolloutManager` has them as its methods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from slime.backends.sglang_utils.engine_client import MEMORY_TAGS
from slime.backends.sglang_utils.server_control import Probe
from slime.config.args import Args
from slime.ray.http_post import use_distributed_post
from slime.ray.placement import Slot
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.servers import RolloutServers, start_rollout_servers
from slime.ray.rollout.watches import EngineEnds, RouterWatch, engine_state
from slime.ray.utils import RayActor
from slime.utils.http_utils import init_http_client
from slime.utils.outages import OUTAGES, origin

logger = logging.getLogger(__name__)

WEIGHTS = ("weights",)


class EngineControl(RayActor):
    """The part of the rollout manager that has the engines.

    Args:
        args: the run's flags.
        engine_slots: each slot that engines take.
    """

    _servers: RolloutServers | None = None
    _router_watch: RouterWatch | None = None
    _replacements: Replacements | None = None  # with --use-fault-tolerance
    _ends: EngineEnds | None = None  # without

    def __init__(self, args: Args, engine_slots: list[Slot]) -> None:
        self.args = args
        self._slots = engine_slots
        self._updatable: list[Any] = []

    def _start_engines(self) -> None:
        self._servers = start_rollout_servers(self.args, slots=self._slots)
        self._servers.publish()
        self._router_watch = RouterWatch(self._servers.models)
        self._router_watch.start()
        if self.args.check_weight_update_equal:
            self._servers.overwrite_weights()
        init_http_client(self.args)
        if self.args.use_distributed_post:
            use_distributed_post(self.args)
        if self.args.use_fault_tolerance:
            self._replacements = Replacements(self._servers, self.args)
            self._replacements.watch.start()
            OUTAGES.listen(self._suspect)
        else:
            self._ends = EngineEnds(self._servers.models)
            self._ends.start()
            OUTAGES.listen(self._ends.suspect)

    def _suspect(self, url: str) -> None:
        """Look at the engines when a request to a router of the run has failed."""
        assert self._replacements is not None and self._servers is not None
        if origin(url) in [router.url for router in self._servers.routers.values()]:
            self._replacements.watch.suspect()

    def _end_engines(self) -> None:
        watch = self._ends if self._replacements is None else self._replacements.watch
        for one in (self._router_watch, watch):
            if one is not None:
                one.stop()
        if self._servers is not None:
            self._servers.shutdown()
            self._servers = None

    @ray.method(concurrency_group="control")
    def replace_engines(self) -> None:
        """Start engines in the places of lost ones; those of the trained model serve after `register_engines`."""
        if self._replacements is not None:
            self._replacements.watch.look(Probe.SCHEDULES)
            if number := self._replacements.replace():
                logger.warning("%d engine(s) were started in place of lost ones", number)

    @ray.method(concurrency_group="control")
    def pause_watch(self) -> int:
        """Do not look at the engines until `register_engines`: they get weights.

        Returns:
            a number that has changed when engines were lost or replaced.
        """
        if self._replacements is None:
            return 0
        self._replacements.watch.pause()
        self._replacements.watch.look(Probe.SCHEDULES)  # a sync fails as a whole if one of them is gone or hangs
        return self._replacements.count

    @ray.method(concurrency_group="control")
    def engines_failed(self, numbers: Sequence[int], why: str) -> int:
        """Lose engines with which a weight sync has failed; where it named none, those that do not answer.

        Args:
            numbers: of those that it names, among the last of `get_updatable_engines`.
            why: it failed.

        Returns:
            as `pause_watch`.
        """
        if self._replacements is None:
            return 0
        before = self._replacements.count
        for number in numbers:
            self._replacements.lose_engine(self._updatable[number], why)
        for probe in (Probe.LISTENS, Probe.SCHEDULES):  # a scheduler may wait in a collective with one that is gone
            if self._replacements.count == before:
                self._replacements.watch.look(probe)
        return self._replacements.count

    @ray.method(concurrency_group="control")
    def ended_engines(self) -> list[str]:
        """Without fault tolerance, which engines have ended without being asked to, and why."""
        return self._ends.look() if self._ends is not None else []

    @ray.method(concurrency_group="control")
    def lacks_engines(self) -> bool:
        """Whether a model has lost all of its engines, and none that was started in their place serves yet."""
        return self._replacements is not None and bool(self._replacements.without_engine())

    @ray.method(concurrency_group="control")
    def hold_requests(self) -> None:
        """Have requests wait until `register_engines`: memory of the engines changes hands during a rollout."""
        if self._replacements is not None:
            self._replacements.hold_requests()

    @ray.method(concurrency_group="control")
    def register_engines(self) -> None:
        """Let new engines, which have the trainer's weights now, serve through the router, and watch all again."""
        if self._replacements is not None:
            self._replacements.register()
            self._replacements.watch.resume()

    @ray.method(concurrency_group="state")  # asked for while engines are replaced, which takes minutes
    def engine_state(self) -> dict[str, Any]:
        """Address -> what each router and engine is busy with, or why it does not tell; for the stall report."""
        if self._servers is None:
            return {}
        routers = [router.url for router in self._servers.routers.values()]
        return engine_state(routers, self._replacements.urls().values() if self._replacements else [])

    @ray.method(concurrency_group="control")
    def get_updatable_engines(self) -> tuple[list[Any], list[int]]:
        """The engines that take the trainer's weights, and the GPUs of each."""
        found = self._servers.updatable if self._servers else []
        self._updatable = [engine for engine, _ in found]
        return [engine for engine, _ in found], [num_gpus for _, num_gpus in found]

    @ray.method(concurrency_group="control")
    def let_go_on(self) -> None:
        """Let engines continue that a weight sync has stopped and whose trainer is lost: requests wait in them, whose
        answers are of no use, but are waited for."""
        if self._servers is not None:
            self._servers.let_go_on()

    @ray.method(concurrency_group="memory")
    def offload(self) -> None:
        """Have the engines that share GPUs with the trainer release their memory (--offload-rollout)."""
        if self._servers is not None:
            if self._replacements is not None:
                self._replacements.watch.pause()
            self._do_without(self._servers.release_memory())

    @ray.method(concurrency_group="memory")
    def onload(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have them take it again: everything, or some kinds of it."""
        if self._servers is not None:
            self._do_without(self._servers.resume_memory(tags))

    def _do_without(self, failed: list[tuple[Any, Exception]]) -> None:
        """Lose engines that did not move their memory; raises the reason where others cannot take their places."""
        for engine, error in failed:
            if self._replacements is None or not self._replacements.lose_engine(engine, str(error)):
                raise error

    @ray.method(concurrency_group="memory")
    def onload_weights(self) -> None:
        """Make room for weights, which must be sent then: there is nothing in it."""
        self.onload(WEIGHTS)

    @ray.method(concurrency_group="memory")
    def onload_kv(self) -> None:
        """Take what is needed to generate, besides weights."""
        self.onload([tag for tag in MEMORY_TAGS if tag not in WEIGHTS])

    def _engine_metrics(self) -> dict[str, float]:
        found = self._replacements.metrics() if self._replacements else {}
        if self._router_watch is not None:
            found["rollout/router_restarts"] = float(self._router_watch.count)
        return found
