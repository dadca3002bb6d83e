"""Everything that generates or scores: for each model a router and its engines.

Started together and ended together; what runs already (a router, external engines) is used and left as it was. It does
not know what is generated: requests go to the routers, weight updates to the engines that take them.

Wait graph of the start: routers and encoders start and wait for nobody; the other engines wait for the encoders of
their model, whose addresses they are given; then each engine is put behind its router, which unblocks the rollouts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.engine_client import FLUSH_DEADLINE_S, MEMORY_TIMEOUT_S
from slime.backends.sglang_utils.external import ExternalEngine, start_external_rollout_servers
from slime.backends.sglang_utils.server_args import EngineSpec
from slime.backends.sglang_utils.server_control import Worker
from slime.config.args import Args, publish_runtime
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan, releases_memory
from slime.processes.wait import WaitTimeout
from slime.ray.placement import Slot
from slime.ray.rollout.router import Router, RouterAddress
from slime.ray.rollout.server_group import START_DEADLINE_S, ServerGroup, nodes_of_engine, threads_per_engine
from slime.ray.utils import get, node_address
from slime.utils.errors import HttpError, UsageError
from slime.utils.http.api_keys import key_of, protect_engine
from slime.utils.misc import url_host

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REMOVE_TIMEOUT_S = 5.0
MEMORY_DEADLINE_S = FLUSH_DEADLINE_S + MEMORY_TIMEOUT_S + 30.0
CHECK_DEADLINE_S = 600.0
CONTINUE_DEADLINE_S = 30.0


@dataclass(eq=False)
class Seat:
    """One engine's place, whoever is in it: the place `index` of a group of ours, or an engine of somebody else's.

    Attributes:
        worker: what a router has to know of the engine, once it is started.
        is_guest: it has joined, and nobody takes its place when it is gone.
        is_lost: it has ended, or does not answer, and was not replaced yet.
        was_without_slots: its slots were waited for, and did not come.
    """

    model: ModelServers
    kind: EngineGroupPlan | None = None
    group: ServerGroup | None = None
    index: int = 0
    external: ExternalEngine | None = None
    worker: Worker | None = None
    is_guest: bool = False
    is_lost: bool = False
    was_without_slots: bool = False

    @property
    def engine(self) -> Any:
        """Who is in it, with the methods of `EngineClient`: a Ray actor, or an external one."""
        return self.external if self.group is None else self.group.engines[self.index]

    @property
    def takes_weights(self) -> bool:
        """Return whether a weight sync updates this engine."""
        return self.model.plan.update_weights and (self.kind is None or self.kind.takes_weights)

    @property
    def num_gpus(self) -> int:
        """GPUs of the engine."""
        return self.engine.info.num_gpus if self.kind is None else self.kind.num_gpus_per_engine

    @property
    def worker_type(self) -> str:
        """The engine's task: "regular", "prefill", "decode" or "encoder"."""
        return self.engine.info.worker_type if self.kind is None else self.kind.worker_type

    @property
    def is_behind_router(self) -> bool:
        """Return whether slime registers the engine with its router. A router of the user finds its own engines."""
        return self.external is None or self.is_guest or self.model.router.is_ours


class ModelServers:
    """One model: its router and its engines, ours and external ones.

    Args:
        plan: which model.
        router: in front of its engines.
        groups: (kind, engines) of ours, in the order of the plan.

    Attributes:
        seats: of every engine: ours, external ones, and guests.
    """

    def __init__(self, plan: ModelPlan, router: Router, groups: list[tuple[EngineGroupPlan, ServerGroup]]) -> None:
        self.plan = plan
        self.router = router
        self.groups = groups
        self.seats = [Seat(self, kind, group, index) for kind, group in groups for index in range(len(group.engines))]
        self._behind: dict[str, Worker] = {}
        self._may_change = threading.RLock()

    @property
    def there(self) -> list[Seat]:
        """The places whose engines are there."""
        return [seat for seat in self.seats if not seat.is_lost]

    def register(self, args: Args) -> None:
        """Register engines with the router, external ones too where they are this model's; the router must run."""
        url = self.router.address.url
        started = [seat.worker for seat in self.seats if seat.worker is not None and seat.worker_type != "encoder"]
        for worker in started:
            self.put_behind_router(worker)
        if args.rollout_external and self.plan.update_weights:
            known = set(server_control.list_workers_sync(url))
            for engine in start_external_rollout_servers(args, url, first_rank=len(started)):
                self.seats.append(Seat(self, external=engine, worker=engine.info.worker))
                if engine.url not in known:
                    self._behind[engine.url] = engine.info.worker

    def put_behind_router(self, worker: Worker) -> None:
        """Have the router send an engine requests."""
        with self._may_change:
            if key_of(worker.url) is None:
                protect_engine(worker.url)
            server_control.register_worker_sync(self.router.address.url, worker)
            self._behind[worker.url] = worker

    def take_from_router(self, worker_url: str) -> None:
        """Have the router send an engine none; a router that does not answer sends none anyway."""
        with self._may_change:
            self._behind.pop(worker_url, None)
            with suppress(HttpError):
                server_control.remove_worker_sync(self.router.address.url, worker_url, timeout_s=REMOVE_TIMEOUT_S)

    def restart_router(self) -> int:
        """Start the router again on its port, with the engines that it had; returns how many.

        An engine that the new router does not take is left out: it does not answer.

        Raises:
            RouterStartError: it did not start.
        """
        with self._may_change:
            self.router.restart()
            taken = 0
            for worker in self._behind.values():
                try:
                    server_control.register_worker_sync(self.router.address.url, worker)
                    taken += 1
                except (HttpError, WaitTimeout) as error:
                    logger.error("engine at %s is not behind the new router: %s", worker.url, error)
            return taken

    def shutdown(self) -> None:
        """End what is ours; engines are removed from a router that is not."""
        with ExitStack() as ending:  # each, whatever fails
            for _, group in self.groups:
                ending.callback(group.shutdown)
            ending.callback(self.router.shutdown)
            for url in () if self.router.is_ours else list(self._behind):
                ending.callback(self.take_from_router, url)


class RolloutServers:
    """The models of a run; the first one's router is the default."""

    def __init__(self, args: Args, models: list[ModelServers]) -> None:
        self._args = args
        self.models = models

    @property
    def routers(self) -> dict[str, RouterAddress]:
        """Name of each model -> where its requests go; the default router is the first."""
        return {model.plan.name: model.router.address for model in self.models}

    @property
    def engines(self) -> list[Any]:
        """Every engine of every model."""
        return [seat.engine for model in self.models for seat in model.there]

    @property
    def updatable(self) -> list[tuple[Any, int]]:
        """(engine, its GPUs) of every engine that takes the trainer's weights."""
        seats = (seat for model in self.models for seat in model.there)
        return [(seat.engine, seat.num_gpus) for seat in seats if seat.takes_weights]

    def release_memory(self) -> list[tuple[Any, Exception]]:
        """Have the engines on the trainer's GPUs give up their memory; it waits for their requests in flight.

        Returns:
            those that did not, and why.
        """
        what = "an engine to release its GPU memory"
        return self._ask(self._releasing, "release_memory_occupation", what, MEMORY_DEADLINE_S)

    def resume_memory(self, tags: Sequence[str]) -> list[tuple[Any, Exception]]:
        """Have them take memory of these kinds again; returns as `release_memory`."""
        what = f"an engine to take GPU memory for {', '.join(tags)}"
        return self._ask(self._releasing, "resume_memory_occupation", what, MEMORY_DEADLINE_S, tags)

    @property
    def _releasing(self) -> list[Any]:
        ours = ((seat, seat.kind) for model in self.models for seat in model.there)
        return [seat.engine for seat, kind in ours if kind is not None and releases_memory(kind, self._args)]

    def _ask(
        self, engines: Sequence[Any], method: str, what: str, deadline_s: float, *values: Any
    ) -> list[tuple[Any, Exception]]:
        """Have engines do something, ours all at once; returns those that did not, and why."""
        refs = [None if isinstance(one, ExternalEngine) else getattr(one, method).remote(*values) for one in engines]
        end, failed = time.monotonic() + deadline_s, list[tuple[Any, Exception]]()
        for engine, ref in zip(engines, refs, strict=True):
            try:
                if isinstance(engine, ExternalEngine):
                    getattr(engine, method)(*values)
                else:
                    get(ref, what, max(0.1, end - time.monotonic()))
            except (RuntimeError, TimeoutError, UsageError) as error:
                failed.append((engine, error))
        return failed

    def publish(self) -> None:
        """Write the routers' addresses into the run's args, where generate and reward functions read them."""
        routers = {name: (url_host(router.ip), router.port) for name, router in self.routers.items()}
        ip, port = next(iter(routers.values()))
        publish_runtime(self._args, sglang_router_ip=ip, sglang_router_port=port, sglang_model_routers=routers)

    def launch(self) -> None:
        """Start everything; returns when every engine takes requests."""
        for model in self.models:
            model.router.launch()
        self._wait_started(self._begin_engines(are_encoders=True))
        begun = self._begin_engines(are_encoders=False)
        for model in self.models:  # first: they take seconds, and one that cannot start is not found after minutes
            model.router.wait_ready()
        self._wait_started(begun)
        for model in self.models:
            model.register(self._args)

    def _begin_engines(self, *, are_encoders: bool) -> list[tuple[Seat, ray.ObjectRef]]:
        """Begin the start of the engines of one kind of all models; (its place, what becomes its engine)."""
        begun: list[tuple[Seat, ray.ObjectRef]] = []
        for model in self.models:
            encoders = [seat.worker.url for seat in model.seats if seat.worker is not None]
            for kind, group in model.groups:
                if (kind.worker_type == "encoder") == are_encoders:
                    seats = [seat for seat in model.seats if seat.group is group]
                    begun += zip(seats, group.launch(encoders), strict=True)
        return begun

    def _wait_started(self, begun: list[tuple[Seat, ray.ObjectRef]]) -> None:
        deadline_s = START_DEADLINE_S[self._args.accelerator] + 60.0
        workers = get([ref for _, ref in begun], f"the start of {len(begun)} engine(s)", deadline_s)
        for (seat, _), worker in zip(begun, workers, strict=True):
            seat.worker = worker

    def overwrite_weights(self) -> None:
        """Have the engines that take the trainer's weights keep a copy of theirs, and overwrite them with noise; the
        first sync is compared with the copy (--check-weight-update-equal)."""
        engines = [engine for engine, _ in self.updatable]
        for action in ("snapshot", "reset_tensors"):
            what = f"the engines' {action} for --check-weight-update-equal"
            for _, error in self._ask(engines, "check_weights", what, CHECK_DEADLINE_S, action):
                raise error

    def let_go_on(self) -> None:
        """Have the engines that take the trainer's weights generate again; one that is gone keeps nobody waiting."""
        engines = [engine for engine, _ in self.updatable]
        self._ask(engines, "continue_generation", "an engine to go on", CONTINUE_DEADLINE_S)

    def stop_drafts(self) -> None:
        """Have the engines that take the trainer's weights draft no more; one that does not answer is warned of."""
        engines = [one for one, _ in self.updatable if not isinstance(one, ExternalEngine) or one.info.drafts]
        for _, error in self._ask(engines, "stop_drafts", "an engine to stop drafting", CONTINUE_DEADLINE_S):
            logger.warning("an engine may still draft: %s", error)

    def shutdown(self) -> None:
        """End the routers and the engines that are ours."""
        with ExitStack() as ending:
            for model in self.models:
                ending.callback(model.shutdown)


def start_rollout_servers(args: Args, *, slots: Sequence[Slot]) -> RolloutServers:
    """Start every engine of the run, and the routers unless one is given; returns when all engines take requests.

    Args:
        args: the run's flags; `engine_models` says what there is.
        slots: every slot of the engines, in the order in which the plan counts them.

    Raises:
        ActorFailure: an engine did not start; quotes the end of its log.
        RouterStartError: a router did not.
        UsageError: an external engine is gone.
    """
    begin = time.monotonic()
    servers = RolloutServers(args, list(_models(args, slots)))
    with ExitStack() as launching:
        launching.callback(servers.shutdown)
        servers.launch()
        launching.pop_all()
    seconds = time.monotonic() - begin
    for model in servers.models:
        logger.info(
            "model %s: %d engine(s) behind %s after %.1f s",
            model.plan.name,
            len(model.there),
            model.router.address.url,
            seconds,
        )
    return servers


def _models(args: Args, slots: Sequence[Slot]) -> Iterator[ModelServers]:
    """The routers and engine actors of every model; nothing is started yet."""
    host, log_dir = _listening_host(args), Path(args.output_dir).absolute() / "logs"
    num_engines = sum(len(group.engine_slots) for model in args.engine_models for group in model.groups)
    rank = 0
    for number, plan in enumerate(args.engine_models):
        name = "router" if number == 0 else f"router_{plan.name}"
        router = Router(
            args,
            host=host or node_address(),
            log_path=log_dir / f"{name}.log",
            is_first=number == 0,
            kind="pd" if number == 0 and _external_pd(args) else plan.kind,
        )
        num_threads = threads_per_engine(Path(plan.model_path), len(os.sched_getaffinity(0)), num_engines)
        groups = []
        for kind in plan.groups:
            specs = _specs(args, plan, kind, first_rank=rank)
            rank += len(specs)
            placed = [
                nodes_of_engine(slots[first : first + kind.num_gpus_per_engine], f"engine {spec.rank}")
                for first, spec in zip(kind.engine_slots, specs, strict=True)
            ]
            group = ServerGroup(args, specs, placed, host=host, log_dir=log_dir, num_threads=num_threads)
            groups.append((kind, group))
        yield ModelServers(plan, router, groups)


def _specs(args: Args, plan: ModelPlan, kind: EngineGroupPlan, *, first_rank: int) -> list[EngineSpec]:
    return [
        EngineSpec(
            rank=first_rank + number,
            model_path=plan.model_path,
            num_gpus=kind.num_gpus_per_engine,
            first_slot=slot,
            settings=kind.settings,
            worker_type=kind.worker_type,
            releases_memory=releases_memory(kind, args),
            takes_weights=plan.update_weights and kind.takes_weights,
        )
        for number, slot in enumerate(kind.engine_slots)
    ]


def _external_pd(args: Args) -> bool:
    return args.rollout_external and any(info.worker_type == "prefill" for info in args.rollout_external_engine_infos)


def _listening_host(args: Args) -> str | None:
    """The loopback where everything is on this machine; None: each server listens on its node's address."""
    is_one_node = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
    has_engines = any(model.groups for model in args.engine_models)  # otherwise they come from who knows where
    is_local = args.sglang_router_ip in (None, LOOPBACK, "localhost")
    is_fixed = not args.elastic_rollout  # else engines of other machines may come
    return LOOPBACK if is_one_node and has_engines and is_local and is_fixed else None
