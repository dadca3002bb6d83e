"""Everything that generates or scores: for each model a router and the engines behind it.

Started together and ended together; what runs already (a router, external engines) is used and left as it was. It does
not know what is generated: requests go to the routers, weight updates to the engines that take them.

Wait graph of the start: routers and encoders start and wait for nobody; the other engines wait for the encoders of
their model, whose addresses they are given; then each engine is put behind its router, which unblocks the rollouts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.engine_client import FLUSH_DEADLINE_S, MEMORY_TIMEOUT_S
from slime.backends.sglang_utils.external import ExternalEngine, start_external_rollout_servers
from slime.backends.sglang_utils.server_args import EngineSpec
from slime.backends.sglang_utils.server_control import Worker
from slime.backends.sglang_utils.topology import EngineGroupPlan, ModelPlan, releases_memory
from slime.ray.rollout.router import Router, RouterAddress
from slime.ray.rollout.server_group import START_DEADLINE_S, ServerGroup, threads_per_engine
from slime.ray.utils import get
from slime.utils.arguments import publish_runtime
from slime.utils.errors import HttpError
from slime.utils.misc import url_host

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REMOVE_TIMEOUT_S = 5.0
MEMORY_DEADLINE_S = FLUSH_DEADLINE_S + MEMORY_TIMEOUT_S + 30.0
CHECK_DEADLINE_S = 600.0
Slot = tuple[Any, int]  # placement group or None, and the index of the bundle


class ModelServers:
    """One model: its router and its engines, ours and external ones.

    Args:
        plan: which model.
        router: in front of its engines.
        groups: (kind, engines) of ours, in the order of the plan.
    """

    def __init__(self, plan: ModelPlan, router: Router, groups: list[tuple[EngineGroupPlan, ServerGroup]]) -> None:
        self.plan = plan
        self.router = router
        self.groups = groups
        self.external: list[ExternalEngine] = []
        self.lost: set[Any] = set()
        """Of `engines`, those that have ended and were not replaced yet."""
        self._registered: list[str] = []

    @property
    def engines(self) -> list[Any]:
        """Every engine, with the methods of `EngineClient`: Ray actors, and external ones."""
        ours = [engine for _, group in self.groups for engine in group.engines]
        return [engine for engine in ours if engine not in self.lost] + self.external

    @property
    def updatable(self) -> list[tuple[Any, int]]:
        """(engine, its GPUs) of every engine that takes the trainer's weights."""
        if not self.plan.update_weights:
            return []
        groups = [(kind.num_gpus_per_engine, group) for kind, group in self.groups if kind.takes_weights]
        ours = [(engine, size) for size, group in groups for engine in group.engines if engine not in self.lost]
        return ours + [(engine, engine.info.num_gpus) for engine in self.external]

    def releasing(self, args: Any) -> list[Any]:
        """The engines that give their GPU memory up when asked to."""
        groups = [group for kind, group in self.groups if releases_memory(kind, args)]
        return [engine for group in groups for engine in group.engines if engine not in self.lost]

    def register(self, args: Any, workers: Sequence[Worker]) -> None:
        """Put engines behind the router, external ones too where they are this model's; needs the router to run."""
        url = self.router.address.url
        for worker in workers:
            server_control.register_worker_sync(url, worker)
            self._registered.append(worker.url)
        if args.rollout_external and self.plan.update_weights:
            known = set(server_control.list_workers_sync(url))
            self.external = start_external_rollout_servers(args, url, first_rank=len(workers))
            self._registered += [engine.url for engine in self.external if engine.url not in known]

    def shutdown(self) -> None:
        """End what is ours; a router that is not is told of the engines that leave it."""
        if not self.router.is_ours:
            for url in self._registered:
                with suppress(HttpError):  # it may be gone already
                    server_control.remove_worker_sync(self.router.address.url, url, timeout_s=REMOVE_TIMEOUT_S)
        self.router.shutdown()
        for _, group in self.groups:
            group.shutdown()


class RolloutServers:
    """The models of a run; the first one's router is the default."""

    def __init__(self, args: Any, models: list[ModelServers]) -> None:
        self._args = args
        self.models = models

    @property
    def routers(self) -> dict[str, RouterAddress]:
        """Name of each model -> where its requests go; the default router is the first."""
        return {model.plan.name: model.router.address for model in self.models}

    @property
    def engines(self) -> list[Any]:
        """Every engine of every model."""
        return [engine for model in self.models for engine in model.engines]

    @property
    def updatable(self) -> list[tuple[Any, int]]:
        """(engine, its GPUs) of every engine that takes the trainer's weights."""
        return [entry for model in self.models for entry in model.updatable]

    def release_memory(self) -> None:
        """Have the engines on the trainer's GPUs give up their memory; it waits for their requests in flight."""
        self._of_releasing("release_memory_occupation", "the engines to release their GPU memory")

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Have them take memory of these kinds again."""
        self._of_releasing("resume_memory_occupation", f"the engines to take GPU memory for {', '.join(tags)}", tags)

    def _of_releasing(self, method: str, what: str, *values: Any) -> None:
        engines = [engine for model in self.models for engine in model.releasing(self._args)]
        get([getattr(engine, method).remote(*values) for engine in engines], what, MEMORY_DEADLINE_S)

    def publish(self) -> None:
        """Write the routers' addresses into the run's args, where generate and reward functions read them."""
        routers = {name: (url_host(router.ip), router.port) for name, router in self.routers.items()}
        ip, port = next(iter(routers.values()))
        publish_runtime(self._args, sglang_router_ip=ip, sglang_router_port=port, sglang_model_routers=routers)

    def launch(self) -> None:
        """Start everything; returns when every engine takes requests."""
        for model in self.models:
            model.router.launch()
        encoders = self._launch_engines(are_encoders=True, encoders={})
        workers = self._launch_engines(are_encoders=False, encoders=encoders)
        for model in self.models:
            model.router.wait_ready()
            model.register(self._args, workers.get(model.plan.name, []))

    def _launch_engines(self, *, are_encoders: bool, encoders: dict[str, list[Worker]]) -> dict[str, list[Worker]]:
        """Start the engines of one kind of all models side by side; name of the model -> its engines."""
        begun: list[tuple[str, ray.ObjectRef]] = []
        for model in self.models:
            urls = [worker.url for worker in encoders.get(model.plan.name, [])]
            for kind, group in model.groups:
                if (kind.worker_type == "encoder") == are_encoders:
                    begun += [(model.plan.name, ref) for ref in group.launch(urls)]
        deadline_s = START_DEADLINE_S[self._args.accelerator] + 60.0
        what = f"the start of {len(begun)} engine(s)"
        found: dict[str, list[Worker]] = {}
        for (name, _), worker in zip(begun, get([ref for _, ref in begun], what, deadline_s), strict=True):
            found.setdefault(name, []).append(worker)
        return found

    def overwrite_weights(self) -> None:
        """Have the engines that take the trainer's weights keep a copy of theirs, and overwrite them with noise; the
        first sync is compared with the copy (--check-weight-update-equal)."""
        for action in ("snapshot", "reset_tensors"):
            external = [engine for engine, _ in self.updatable if isinstance(engine, ExternalEngine)]
            refs = [engine.check_weights.remote(action) for engine, _ in self.updatable if engine not in external]
            for engine in external:
                engine.check_weights(action)
            get(refs, f"the engines' {action} for --check-weight-update-equal", CHECK_DEADLINE_S)

    def shutdown(self) -> None:
        """End the routers and the engines that are ours."""
        for model in self.models:
            model.shutdown()


def start_rollout_servers(args: Any, *, slots: Sequence[Slot]) -> RolloutServers:
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
    try:
        servers.launch()
    except BaseException:
        servers.shutdown()
        raise
    seconds = time.monotonic() - begin
    for model in servers.models:
        logger.info(
            "model %s: %d engine(s) behind %s after %.1f s",
            model.plan.name,
            len(model.engines),
            model.router.address.url,
            seconds,
        )
    return servers


def _models(args: Any, slots: Sequence[Slot]) -> Iterator[ModelServers]:
    """The routers and engine actors of every model; nothing is started yet."""
    host, log_dir = _listening_host(args), Path(args.output_dir).absolute() / "logs"
    num_engines = sum(len(group.engine_slots) for model in args.engine_models for group in model.groups)
    rank = 0
    for number, plan in enumerate(args.engine_models):
        name = "router" if number == 0 else f"router_{plan.name}"
        router = Router(
            args,
            host=host or ray.util.get_node_ip_address(),
            log_path=log_dir / f"{name}.log",
            is_first=number == 0,
            kind="pd" if number == 0 and _external_pd(args) else plan.kind,
        )
        num_threads = threads_per_engine(Path(plan.model_path), os.cpu_count() or 1, num_engines)
        groups = []
        for kind in plan.groups:
            specs = _specs(args, plan, kind, first_rank=rank)
            rank += len(specs)
            placed = [slots[slot] for slot in kind.engine_slots]
            group = ServerGroup(args, specs, placed, host=host, log_dir=log_dir, num_threads=num_threads)
            groups.append((kind, group))
        yield ModelServers(plan, router, groups)


def _specs(args: Any, plan: ModelPlan, kind: EngineGroupPlan, *, first_rank: int) -> list[EngineSpec]:
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


def _external_pd(args: Any) -> bool:
    return args.rollout_external and any(info.worker_type == "prefill" for info in args.rollout_external_engine_infos)


def _listening_host(args: Any) -> str | None:
    """The loopback where everything is on this machine; None: each server listens on its node's address."""
    is_one_node = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
    has_engines = any(model.groups for model in args.engine_models)  # otherwise they come from who knows where
    is_local = args.sglang_router_ip in (None, LOOPBACK, "localhost")
    return LOOPBACK if is_one_node and has_engines and is_local else None
