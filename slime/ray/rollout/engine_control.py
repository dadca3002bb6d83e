"""The engines of a run as the rollout manager's process has them: started, watched, replaced, and their memory moved.

The driver asks for each of these (slime.ray.engine_upkeep, `GpuTurns`); `RolloutManager` has them as its methods.

--use-distributed-post: requests leave from a Ray actor on every node instead of from the rollout manager alone. One
process sends and parses a few thousand requests a second; with many engines that is the limit. `post` of the process
that calls `use_distributed_post` hands each request to the next actor in turn.

Wait graph of such a request: it waits for its actor, which waits for the server with the deadline and the retries of
`http_utils.post`; the answer, or the same HttpError, unblocks the caller. When the actor dies, the request is sent
again from another one, and from the calling process where no other is left. A caller that is cancelled cancels the
request in the actor, which closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.backends.sglang_utils.engine_client import MEMORY_TAGS
from slime.backends.sglang_utils.server_control import Probe
from slime.config.args import Args
from slime.observability.rollout_metrics import draft_metrics
from slime.processes.wait import Watch
from slime.ray.placement import Slot
from slime.ray.rollout.joins import EngineJoins
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.servers import RolloutServers, start_rollout_servers
from slime.ray.rollout.watches import DraftWatch, EngineEnds, EngineLoads, RouterWatch, engine_state
from slime.ray.utils import RayActor, actor_env, get
from slime.utils import http_utils
from slime.utils.errors import HttpError
from slime.utils.http.network import OUTAGES, origin
from slime.utils.http_utils import init_http_client
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

WEIGHTS = ("weights",)
START_DEADLINE_S = 120.0
MAX_REQUESTS_PER_ACTOR = 10_000
MAX_RESTARTS = 10  # Starts of one actor in place of one that died; then its requests leave from elsewhere.


class EngineControl(RayActor):
    """The part of the rollout manager that has the engines.

    Args:
        args: the run's flags.
        engine_slots: each slot that engines take.
    """

    _router_watch: RouterWatch | None = None
    replacements: Replacements | None = None  # with --use-fault-tolerance
    _ends: EngineEnds | None = None  # without
    _loads: EngineLoads | None = None
    _drafts: DraftWatch | None = None  # where there are engines

    def __init__(self, args: Args, engine_slots: list[Slot]) -> None:
        self.args = args
        self._slots = engine_slots
        self._servers = RolloutServers(args, [])
        self._ending = ExitStack()
        self._updatable: list[Any] = []

    def _start_engines(self) -> None:
        self._servers = start_rollout_servers(self.args, slots=self._slots)
        self._ending.callback(self._servers.shutdown)
        self._servers.publish()
        self._drafts = DraftWatch(self.args.spec_break_even_length, may_stop=self.args.spec_auto_off)
        self._router_watch = RouterWatch(self._servers.models)
        self._begin(self._router_watch)
        self._loads = EngineLoads(self._router_urls)
        self._begin(self._loads)
        if self.args.check_weight_update_equal:
            self._servers.overwrite_weights()
        init_http_client(self.args)
        if self.args.use_distributed_post:
            use_distributed_post(self.args)
        if self.args.use_fault_tolerance:
            self.replacements = Replacements(self._servers, self.args)
            self._begin(self.replacements.watch)
            OUTAGES.listen(self._suspect)
            if self.args.elastic_rollout:
                self._begin(EngineJoins(self._servers, self.replacements, self.args, self._slots))
        else:
            self._ends = EngineEnds(self._servers.models)
            self._begin(self._ends)
            OUTAGES.listen(self._ends.suspect)

    def _begin(self, watch: Watch) -> None:
        watch.start()
        self._ending.callback(watch.stop)

    def _suspect(self, url: str) -> None:
        """Look at the engines when a request to a router of the run has failed."""
        if origin(url) in self._router_urls():
            self._replaced.watch.suspect()

    @property
    def _replaced(self) -> Replacements:
        """The replacements; the driver asks for what concerns them only with --use-fault-tolerance."""
        assert self.replacements is not None
        return self.replacements

    def _end_engines(self) -> None:
        """End the watches and then the engines, each whatever fails before it."""
        self._ending.close()
        self._servers = RolloutServers(self.args, [])

    @ray.method(concurrency_group="control")
    def replace_engines(self) -> None:
        """Start engines in the places of lost ones; those of the trained model serve after `register_engines`."""
        self._replaced.watch.look(Probe.SCHEDULES)
        if number := self._replaced.replace():
            logger.warning("%d engine(s) were started in place of lost ones", number)

    @ray.method(concurrency_group="control")
    def pause_watch(self) -> int:
        """Do not look at the engines until `register_engines`: they get weights.

        Returns:
            a number that has changed when engines were lost or replaced.
        """
        self._replaced.watch.pause()
        self._replaced.admit()
        self._replaced.watch.look(Probe.SCHEDULES)  # a sync fails as a whole if one of them is gone or hangs
        return self._replaced.count

    @ray.method(concurrency_group="control")
    def engines_failed(self, numbers: Sequence[int], why: str) -> int:
        """Lose engines with which a weight sync has failed; where it named none, those that do not answer.

        Args:
            numbers: of those that it names, among the last of `get_updatable_engines`.
            why: it failed.

        Returns:
            as `pause_watch`.
        """
        before = self._replaced.count
        for number in numbers:
            self._replaced.lose_engine(self._updatable[number], why)
        for probe in (Probe.LISTENS, Probe.SCHEDULES):  # a scheduler may wait in a collective with one that is gone
            if self._replaced.count == before:
                self._replaced.watch.look(probe)
        return self._replaced.count

    @ray.method(concurrency_group="control")
    def ended_engines(self) -> list[str]:
        """Without fault tolerance, which engines have ended without being asked to, and why."""
        return self._ends.look() if self._ends is not None else []

    @ray.method(concurrency_group="control")
    def lacks_engines(self) -> bool:
        """Whether a model has lost all of its engines, and none that was started in their place serves yet."""
        return bool(self._replaced.without_engine())

    @ray.method(concurrency_group="control")
    def hold_requests(self) -> None:
        """Have requests wait until `register_engines`: memory of the engines changes hands during a rollout."""
        self._replaced.hold_requests()

    @ray.method(concurrency_group="control")
    def register_engines(self) -> None:
        """Let new engines, which have the trainer's weights now, serve through the router, and watch all again."""
        self._replaced.register()
        self._replaced.watch.resume()

    def _router_urls(self) -> list[str]:
        return [router.url for router in self._servers.routers.values()]

    @ray.method(concurrency_group="state")  # asked for while engines are replaced, which takes minutes
    def engine_state(self) -> dict[str, Any]:
        """Address -> what each router and engine is busy with, or why it does not tell; for the stall report."""
        return engine_state(self._router_urls(), self.replacements.urls().values() if self.replacements else [])

    @ray.method(concurrency_group="control")
    def get_updatable_engines(self) -> tuple[list[Any], list[int]]:
        """The engines that take the trainer's weights, and the GPUs of each."""
        found = self._servers.updatable
        self._updatable = [engine for engine, _ in found]
        return self._updatable, [num_gpus for _, num_gpus in found]

    @ray.method(concurrency_group="control")
    def admit_engines(self) -> tuple[list[Any], list[int]]:
        """Let engines in that have joined (--elastic-rollout).

        Returns:
            those that have no weights of the trainer's yet, and the GPUs of each.
        """
        without = self._replaced.admit()
        found = [(engine, size) for engine, size in self._servers.updatable if engine in without]
        if found:
            self._replaced.watch.pause()
            self._updatable = [engine for engine, _ in found]
        return [engine for engine, _ in found], [size for _, size in found]

    @ray.method(concurrency_group="control")
    def let_go_on(self) -> None:
        """Let engines continue that a weight sync has stopped and whose trainer is lost: requests wait in them, whose
        answers are of no use, but are waited for."""
        self._servers.let_go_on()

    @ray.method(concurrency_group="memory")
    def offload(self) -> None:
        """Have the engines that share GPUs with the trainer release their memory (--offload-rollout)."""
        if self.replacements is not None:
            self.replacements.watch.pause()
        self._do_without(self._servers.release_memory())

    @ray.method(concurrency_group="memory")
    def onload(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have them take it again: everything, or some kinds of it."""
        self._do_without(self._servers.resume_memory(tags))

    def _do_without(self, failed: list[tuple[Any, Exception]]) -> None:
        """Lose engines that did not move their memory; raises the reason where others cannot take their places."""
        for engine, error in failed:
            if self.replacements is None or not self.replacements.lose_engine(engine, str(error)):
                raise error

    @ray.method(concurrency_group="memory")
    def onload_weights(self) -> None:
        """Make room for weights, which must be sent then: there is nothing in it."""
        self.onload(WEIGHTS)

    @ray.method(concurrency_group="memory")
    def onload_kv(self) -> None:
        """Take what is needed to generate, besides weights."""
        self.onload([tag for tag in MEMORY_TAGS if tag not in WEIGHTS])

    def _note_drafts(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Metrics of a rollout's drafts against break-even; drafts that have to stop are stopped, in new engines too.

        Zero drafts are verifications for SGLang, which accept none: what it counts then is taken from the samples.
        """
        if self._drafts is None:
            return {}
        if self._drafts.is_over:
            for sample in samples:
                sample.spec_info = Sample.SpecInfo()
        found = self._drafts.note(draft_metrics(samples).get("spec_accept_length"))
        if self._drafts.is_over:
            self._servers.stop_drafts()
        return found

    def _engine_metrics(self) -> dict[str, float]:
        found = self.replacements.metrics() if self.replacements else {}
        if self._router_watch is not None:
            found["rollout/router_restarts"] = float(self._router_watch.count)
        return found | (self._loads.take() if self._loads else {})


class PostActor:
    """Sends what it is given, from the node that it is on."""

    def __init__(self, args: Args) -> None:
        http_utils.init_http_client(args)

    async def post(self, url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        """`http_utils.post` of a payload that is JSON already."""
        return await http_utils.post_body(url, body, headers, max_retries)

    async def node(self) -> str:
        """Id of the node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())


def use_distributed_post(args: Args) -> list[Any]:
    """Start an actor on every node and have `http_utils.post` of this process go through them.

    Args:
        args: reads what `init_http_client` does.

    Returns:
        the actors, which live as long as this process keeps them.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [_start(args, node) for node in nodes]
    get([actor.node.remote() for actor in actors], "the actors of --use-distributed-post", START_DEADLINE_S)
    http_utils.set_post_transport(_Turn(actors).send)
    logger.info("requests are sent by %d actor(s), one on every node", len(actors))
    return actors


def _start(args: Args, node_id: str) -> Any:
    return (
        ray.remote(PostActor)
        .options(
            num_cpus=0,
            max_restarts=MAX_RESTARTS,
            max_concurrency=MAX_REQUESTS_PER_ACTOR,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": actor_env()},
        )
        .remote(args)
    )


class _Turn:
    """Hands requests to actors in turn; Ray starts one that died again."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._begun = 0
        self._died: set[int] = set()

    async def send(self, url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        """Do what `http_utils.post_body` does, from the next actor in turn, and from another where that has died.

        Raises:
            HttpError: as `post_body` raises it, or the actor died and `max_retries` is 0.
        """
        self._begun += 1
        first, count = self._begun, len(self._actors)
        for number in (step % count for step in range(first, first + count)):
            try:
                return await _result(self._actors[number].post.remote(url, body, headers, max_retries))
            except RayActorError as error:
                if not max_retries:  # nobody knows whether the server has had the request
                    raise HttpError(f"POST {url} was lost with an actor of --use-distributed-post ({error})") from None
                if number not in self._died:
                    self._died.add(number)
                    why = str(error).partition("\n")[0]
                    logger.warning("an actor of --use-distributed-post died; others send its requests (%s)", why)
        return await http_utils.post_body(url, body, headers, max_retries)


async def _result(ref: ray.ObjectRef) -> Any:
    """The answer to a request that an actor sends."""
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, HttpError) else error from None
