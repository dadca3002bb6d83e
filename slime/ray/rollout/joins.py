"""Engines that join a run and leave it (--elastic-rollout).

They come on two ways: somebody starts one and says so (`slime.backends.sglang_utils.join`), or the run's Ray has room
for one, on a new node or on a slot that is free. Either way it is looked at, waits until the driver lets it in
(`Replacements.admit`), gets the trainer's weights, and serves. One that is to leave gets no more requests, finishes
those that it has, and goes; on a node that Ray is about to drain likewise. An engine of this kind that is lost is
not replaced, but another may join.

Room is given back as soon as the run's own places need it: they may have lost a node.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as ray_state

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.external import (
    FLAG,
    ExternalEngine,
    discover_external_engines,
    external_engine_problems,
)
from slime.backends.sglang_utils.join import DRAINING, GONE, JOINED, REFUSED, SERVING, GuestBook, JoinRequest
from slime.backends.sglang_utils.server_args import EngineSpec
from slime.backends.sglang_utils.server_control import Worker
from slime.config.args import Args
from slime.config.sglang.topology import EngineGroupPlan
from slime.processes.wait import Watch
from slime.ray.placement import Slot
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.server_group import ServerGroup, threads_per_engine
from slime.ray.rollout.servers import ModelServers, RolloutServers, Seat
from slime.ray.utils import SLOT_RESOURCE, ActorFailure, get
from slime.utils.errors import HttpError, UsageError
from slime.utils.http.api_keys import protect, protect_engine

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ASK_S = 5.0
PLACE_S = 2.0
REST_S = 60.0  # After a start that failed, before the next one is tried.


@dataclass
class _Guest:
    """An engine that somebody else has started, by its place in the guest book."""

    url: str
    state: str


@dataclass
class _OnNode:
    """An engine that the run has started where Ray had room."""

    placement: Any
    node: str
    kind: EngineGroupPlan
    group: ServerGroup
    starting: ray.ObjectRef
    worker: Worker | None = None
    leaves: bool = False


class EngineJoins(Watch):
    """Lets engines of the first model come and go.

    Args:
        servers: of the run.
        replacements: which have their places.
        args: of the run.
        slots: of the run's own engines.
    """

    def __init__(self, servers: RolloutServers, replacements: Replacements, args: Args, slots: list[Slot]) -> None:
        super().__init__("engine-joins", every_s=LOOK_S)
        self._model: ModelServers = servers.models[0]
        self._replacements, self._args, self._slots = replacements, args, slots
        self._book = GuestBook(Path(args.output_dir))
        self._guests: dict[str, _Guest] = {}
        self._on_nodes: list[_OnNode] = []
        self._next_rank = len(servers.engines)
        self._rests_until = 0.0
        self._book.open()

    def stop(self) -> None:
        """End; engines that joined are told that the run has ended, and the run's own among them are ended."""
        super().stop()
        self._thread.join(timeout=ASK_S)
        with ExitStack() as ending:
            ending.callback(self._book.close)
            for one in list(self._on_nodes):
                ending.callback(self._end, one)

    def tick(self) -> None:
        """Look once at who wants to come or go."""
        self._book.beat()
        for name, request in self._book.requests().items():
            if name not in self._guests:
                self._receive(name, request)
            elif self._guests[name].state not in (REFUSED, GONE):
                self._follow(name, request)
        if self._slots:
            self._look_at_nodes()

    # ---- engines of somebody else

    def _receive(self, name: str, request: JoinRequest) -> None:
        why = "it wants to leave already" if request.wants_to_leave else self._why_not(request, len(self._guests))
        self._guests[name] = _Guest(request.url, REFUSED if why else JOINED)
        logger.warning("engine at %s %s", request.url, f"may not join: {why}" if why else "joins")
        self._book.answer(name, self._guests[name].state, why)

    def _why_not(self, request: JoinRequest, number: int) -> str:
        """Why an engine may not join, which it otherwise has done now."""
        try:
            [info] = discover_external_engines([request.url], ASK_S, api_key=request.key)
        except UsageError as error:
            return str(error).removeprefix(f"{FLAG} ")
        info = dataclasses.replace(info, key=request.key)
        problems = [p.removeprefix(f"{FLAG} ") for p in external_engine_problems(self._args, [info], set())]
        if info.worker_type != "regular":
            problems.append(f"it is a {info.worker_type} server, and only regular ones may join")
        if self._replacements.is_waiting(info.url) is not None or info.url in self._replacements.urls().values():
            problems.append("it is one of the run's engines already")
        if not problems:
            engine = ExternalEngine(info, rank=self._next_rank + number)
            self._replacements.join(Seat(self._model, external=engine, worker=info.worker, is_guest=True))
        return " ".join(problems)

    def _follow(self, name: str, request: JoinRequest) -> None:
        """Tell an engine what has become of it, where that has changed."""
        guest = self._guests[name]
        waits, why = self._replacements.is_waiting(guest.url), ""
        if guest.state == DRAINING:
            state = GONE if _is_idle(guest.url) else DRAINING
        elif waits is None:
            state, why = GONE, "it gave no answer, and the run goes on without it"
        elif request.wants_to_leave:
            self._replacements.leave(guest.url)
            state = DRAINING
        else:
            state = JOINED if waits else SERVING
        if state != guest.state:
            guest.state = state
            self._book.answer(name, state, why)
            if state == GONE:
                protect(guest.url, None)  # another server may get the port

    # ---- engines of ours, where Ray has room

    def _look_at_nodes(self) -> None:
        draining = set(ray_state.get_draining_nodes())
        has_places = ray.util.placement_group_table(self._slots[0].group)["state"] == "CREATED"
        for one in list(self._on_nodes):
            self._look_after(one, is_to_leave=one.node in draining or not has_places)
        if has_places and time.monotonic() >= self._rests_until:
            self._grow()

    def _look_after(self, one: _OnNode, *, is_to_leave: bool) -> None:
        if one.worker is None and is_to_leave:
            return self._end(one)
        if one.worker is None and not self._is_started(one):
            return None
        assert one.worker is not None
        if is_to_leave and not one.leaves:
            one.leaves = True
            self._replacements.leave(one.worker.url)
        is_lost = not one.leaves and self._replacements.is_waiting(one.worker.url) is None
        if is_lost or (one.leaves and _is_idle(one.worker.url)):
            self._end(one)
        return None

    def _is_started(self, one: _OnNode) -> bool:
        if not ray.wait([one.starting], timeout=0)[0]:
            return False
        try:
            one.worker = get(one.starting, "an engine on a new node", ASK_S)
        except (ActorFailure, TimeoutError, UsageError) as error:
            logger.error("an engine that was to join did not start; another try in %.0f s: %s", REST_S, error)
            self._rests_until = time.monotonic() + REST_S
            self._end(one)
            return False
        assert one.worker is not None
        protect_engine(one.worker.url)  # it is asked before it is registered with its router
        self._replacements.join(Seat(self._model, one.kind, one.group, worker=one.worker, is_guest=True))
        return True

    def _grow(self) -> None:
        """Begin to start an engine, where there is room for one."""
        kind = next((kind for kind, _ in self._model.groups if kind.takes_weights), None)
        resource = SLOT_RESOURCE[self._args.accelerator]
        if kind is None or ray.available_resources().get(resource, 0.0) < kind.num_gpus_per_engine:
            return
        placement = ray.util.placement_group([{resource: 1.0}] * kind.num_gpus_per_engine, strategy="STRICT_PACK")
        if not placement.wait(timeout_seconds=PLACE_S):  # no node has room for a whole one
            ray.util.remove_placement_group(placement)
            self._rests_until = time.monotonic() + REST_S
            return
        node = ray.util.placement_group_table(placement)["bundles_to_node_id"][0]
        address = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        group = self._group(kind, Slot(placement, 0, address))
        logger.warning("there is room on %s: an engine is started there, and joins", address)
        self._on_nodes.append(_OnNode(placement, node, kind, group, group.launch()[0]))

    def _group(self, kind: EngineGroupPlan, slot: Slot) -> ServerGroup:
        plan, rank = self._model.plan, self._next_rank
        self._next_rank += 1
        threads = threads_per_engine(Path(plan.model_path), len(os.sched_getaffinity(0)), rank + 1)
        spec = EngineSpec(
            rank=rank,
            model_path=plan.model_path,
            num_gpus=kind.num_gpus_per_engine,
            first_slot=rank * kind.num_gpus_per_engine,
            settings=kind.settings,
        )
        logs = Path(self._args.output_dir).absolute() / "logs"
        return ServerGroup(self._args, [spec], [[slot]], host=None, log_dir=logs, num_threads=threads)

    def _end(self, one: _OnNode) -> None:
        one.group.shutdown()
        ray.util.remove_placement_group(one.placement)
        self._on_nodes.remove(one)


def _is_idle(url: str) -> bool:
    """Whether an engine has no more requests, or gives no answer any more."""
    try:
        loads: list[dict[str, Any]] = server_control.loads_sync(url, timeout_s=ASK_S)
    except HttpError:
        return True
    return not any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)
