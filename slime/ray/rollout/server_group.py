"""Engines of one kind: Ray actors, started in parallel, each on ports found on its own node; one actor a node.

An engine runs one server process on each of its nodes, with an equal share of the engine's GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from slime.backends.sglang_utils.engine_client import EngineContact
from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args
from slime.backends.sglang_utils.server_control import Worker
from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.config.args import Args
from slime.processes.registry import registry
from slime.ray.placement import ENGINE_SHARE, Slot
from slime.ray.rollout.router import PortBlock, reserve_block
from slime.ray.utils import actor_env, check_network, get, in_bundle, node_address, slot_options
from slime.utils.errors import UsageError
from slime.utils.http.api_keys import use_keys

logger = logging.getLogger(__name__)

START_DEADLINE_S = {"cpu": 600.0, "cuda": 1800.0}  # a large model takes many minutes to load and to capture graphs
SHUTDOWN_DEADLINE_S = 30.0
MAX_STARTS = 3
JOIN_DEADLINE_S = 120.0
CHECK_INTERVAL_S = 2.0  # Between two questions whether the other nodes of an engine that starts still run.
# A server takes as many GPUs as it is large, so it has to see them all, not only its actor's own (HIP: AMD's).
SHOW_ALL_GPUS = {f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES": "1" for kind in ("CUDA", "HIP")}
SMALL_MODEL_BYTES = 100 * 2**20
CONCURRENCY_GROUPS = {"control": 1}  # Threads of an engine's actor: one that is starting can be ended.
# Offsets in an engine's block of ports; the server's own is 0. Behind the bootstrap port comes that for encoders.
NCCL_PORT, BOOTSTRAP_PORT, ENCODER_PORT, DIST_INIT_PORT = 1, 2, 3, 4
PORTS = (0, NCCL_PORT, BOOTSTRAP_PORT, ENCODER_PORT, DIST_INIT_PORT)


class EngineActor(SGLangEngine):
    """An engine that finds its ports and its GPUs where Ray has put it, or the part of one that is on one node.

    The first node's actor is the engine: its server takes requests, and everything that is asked of the engine. Those
    of the other nodes (`join`, `check`) only run their ranks.

    Args:
        args: the run's flags.
        spec: which engine.
        host: address to listen on; None is this node's.
        log_path: file for the server's output.
        num_threads: OMP threads of a CPU server.
    """

    def __init__(self, args: Args, spec: EngineSpec, *, host: str | None, log_path: str, num_threads: int) -> None:
        use_keys(vars(args).get("run_keys"))
        registry()  # in this thread, the main one: no other can catch signals
        super().__init__(
            {},
            rank=spec.rank,
            log_path=log_path,
            accelerator=args.accelerator,
            num_threads=num_threads,
            keeps_embeddings=args.freeze_vision_tower or not spec.takes_weights,
        )
        self._args = args
        self._spec = spec
        self._given_host = host
        self._others: list[Any] = []
        self._block: PortBlock | None = None
        self._checked_at = 0.0

    def contact(self) -> EngineContact:
        """How trainers reach this engine, and in which slot it is."""
        return dataclasses.replace(super().contact(), first_slot=self._spec.first_slot)

    def launch(self, deadline_s: float, encoder_urls: Sequence[str] = (), others: Sequence[Any] = ()) -> Worker:
        """Start the server; one whose free port was snatched away is started again on others.

        Args:
            deadline_s: until it is healthy.
            encoder_urls: servers that encode images for it.
            others: the actors of its other nodes.

        Returns:
            what a router needs to know of it.

        Raises:
            EngineStartError: see `SGLangEngine.start`.
        """
        self._others = list(others)
        self._look_at_network()
        end, tried = time.monotonic() + deadline_s, list[int]()
        while True:
            block = reserve_block(self._host, needed=PORTS, avoid=tried)
            try:
                place = self._settle(block, encoder_urls, num_nodes=1 + len(others))
                self._call_others(place, encoder_urls)
                url = self.start(max(0.0, end - time.monotonic()))
                bootstrap_port = self._server_kwargs.get("disaggregation_bootstrap_port")
                return Worker(url, self._spec.worker_type, bootstrap_port)
            except EngineStartError as error:
                tried.append(block.first)
                if not error.port_taken or len(tried) == MAX_STARTS:
                    raise
                logger.warning("a port of engine %d was taken; starting it on others", self.rank)
            finally:
                block.release()

    def join(self, meeting: str, node_rank: int, num_nodes: int, encoder_urls: Sequence[str]) -> None:
        """Begin to run the ranks of another node; once more where they run already.

        Args:
            meeting: `host:port` on the first node.
            node_rank: of this node among the engine's.
            num_nodes: the engine has.
            encoder_urls: as of `launch`.
        """
        self.shutdown()
        self._look_at_network()
        # Kept while it runs: nobody asks its own server, which only says that it is there.
        self._block = reserve_block(self._host, needed=PORTS)
        self._settle(self._block, encoder_urls, num_nodes=num_nodes, node_rank=node_rank, meeting=meeting)
        self._begin()

    def check(self) -> None:
        """Do nothing while the ranks of `join` run.

        Raises:
            EngineStartError: they have ended; quotes the end of their log.
        """
        try:
            self.check_alive()
        except EngineStartError as error:
            raise self._start_error(error, self._reason(self._log_of_this_start())) from None

    @ray.method(concurrency_group="control")
    def ending(self) -> str | None:
        """See `SGLangEngine`; answers whatever else the engine is asked at that time."""
        return super().ending()

    @ray.method(concurrency_group="control")
    def shutdown(self) -> None:
        """End the server and its children, also one that is starting; nothing happens when it does not run."""
        super().shutdown()
        if self._block is not None:
            self._block.release()
            self._block = None

    def _look_at_network(self) -> None:
        check_network(f"engine {self.rank}", uses_nccl=self._args.accelerator == "cuda")
        self._host = self._given_host or node_address()

    def _settle(
        self,
        block: PortBlock,
        encoder_urls: Sequence[str],
        *,
        num_nodes: int,
        node_rank: int = 0,
        meeting: str | None = None,
    ) -> EnginePlace:
        """Choose the server's arguments for a place on this node."""
        place = EnginePlace(
            host=self._host,
            port=block[0],
            nccl_port=block[NCCL_PORT],
            bootstrap_port=block[BOOTSTRAP_PORT],
            dist_init_port=block[DIST_INIT_PORT],
            num_nodes=num_nodes,
            node_rank=node_rank,
            meeting=meeting,
        )
        spec = dataclasses.replace(self._spec, encoder_urls=tuple(encoder_urls))
        device = device_arguments(self._args.accelerator)
        self._server_kwargs = build_server_args(self._args, spec, place) | device
        return place

    def _call_others(self, place: EnginePlace, encoder_urls: Sequence[str]) -> None:
        joining = [
            other.join.remote(place.dist_init_addr, number, place.num_nodes, list(encoder_urls))
            for number, other in enumerate(self._others, start=1)
        ]
        get(joining, f"the other nodes of engine {self.rank}", JOIN_DEADLINE_S)
        self._checked_at = time.monotonic()

    def check_alive(self) -> None:
        """Raise what ended the engine, by its log; return while it runs."""
        super().check_alive()
        if not self._others or time.monotonic() < self._checked_at + CHECK_INTERVAL_S:
            return
        self._checked_at = time.monotonic()
        for number, other in enumerate(self._others, start=1):
            try:
                ray.get(other.check.remote(), timeout=JOIN_DEADLINE_S)
            except RayTaskError as error:
                cause = error.cause
                port_taken = isinstance(cause, EngineStartError) and cause.port_taken
                raise EngineStartError(f"node {number} of engine {self.rank}: {cause}", port_taken) from None
            except RayError as error:
                raise EngineStartError(f"node {number} of engine {self.rank} is lost: {error}") from None


def device_arguments(accelerator: str) -> dict[str, Any]:
    """Where the engine's GPUs begin. Ray gives the actor the first; the placement puts the others next to it."""
    if accelerator != "cuda":
        return {}
    first = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES")
    return {"base_gpu_id": visible.split(",").index(first) if visible else int(first)}


class ServerGroup:
    """Engines of one kind.

    Args:
        args: the run's flags.
        specs: of each engine.
        placements: of each engine the first slot on each of its nodes.
        host: address the engines listen on; None is the address of the node each is on.
        log_dir: where `engine_<rank>.log` is written.
        num_threads: OMP threads of each CPU engine.
    """

    def __init__(
        self,
        args: Args,
        specs: Sequence[EngineSpec],
        placements: Sequence[Sequence[Slot]],
        *,
        host: str | None,
        log_dir: Path,
        num_threads: int,
    ) -> None:
        self._args = args
        self._seats = list(zip(specs, placements, strict=True))
        self._host, self._log_dir, self._num_threads = host, log_dir, num_threads
        self.engines: list[Any] = []  # Of each, the actor that is asked: on the first of its nodes.
        self._others: list[list[Any]] = []  # Of each engine, the actors of its other nodes.
        for spec, slots in self._seats:
            first, *others = self._create_all(spec, slots)
            self.engines.append(first)
            self._others.append(others)

    def _create_all(self, spec: EngineSpec, slots: Sequence[Slot]) -> list[Any]:
        names = [f"engine_{spec.rank}.log", *(f"engine_{spec.rank}.node{n}.log" for n in range(1, len(slots)))]
        return [self._create(spec, slot, self._log_dir / name) for slot, name in zip(slots, names, strict=True)]

    def _create(self, spec: EngineSpec, slot: Slot, log_path: Path) -> Any:
        accelerator = self._args.accelerator
        extra = SHOW_ALL_GPUS if accelerator == "cuda" else {}
        options = slot_options(accelerator, ENGINE_SHARE) | {"runtime_env": {"env_vars": actor_env(extra)}}
        options["scheduling_strategy"] = in_bundle(slot.group, slot.bundle)
        return (
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor)
            .options(**options)
            .remote(self._args, spec, host=self._host, log_path=str(log_path), num_threads=self._num_threads)
        )

    def launch(self, encoder_urls: Sequence[str] = ()) -> list[ray.ObjectRef]:
        """Start every server at once; each reference becomes the server's `Worker` when it is healthy, or fails."""
        return [self._launch(index, encoder_urls) for index in range(len(self.engines))]

    def _launch(self, index: int, encoder_urls: Sequence[str]) -> ray.ObjectRef:
        deadline_s = START_DEADLINE_S[self._args.accelerator]
        launch = self.engines[index].launch
        return launch.remote(deadline_s, list(encoder_urls), self._others[index])

    def replace(self, index: int, encoder_urls: Sequence[str] = ()) -> ray.ObjectRef:
        """End an engine that is of no use any more, and start another in its place; as of `launch`."""
        self.end(index)
        self.engines[index], *self._others[index] = self._create_all(*self._seats[index])
        return self._launch(index, encoder_urls)

    def is_placed(self, index: int) -> bool:
        """Whether the slots of an engine are there: those of a lost node are not, until Ray finds them another."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        _, slots = self._seats[index]
        return all(ray.util.placement_group_table(s.group)["bundles_to_node_id"][s.bundle] in alive for s in slots)

    def end(self, index: int) -> None:
        """End one server, on all its nodes, and its actors."""
        _end([self.engines[index], *self._others[index]])

    def shutdown(self) -> None:
        """End every server and its actors."""
        _end([*self.engines, *(other for others in self._others for other in others)])
        self.engines, self._others = [], []


def _end(engines: Sequence[Any]) -> None:
    refs = [engine.shutdown.remote() for engine in engines]
    ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_DEADLINE_S)
    for engine in engines:
        ray.kill(engine)  # what did not answer dies with its actor


def threads_per_engine(model_path: Path, num_cores: int, num_engines: int) -> int:
    """OMP threads of each CPU engine: an equal share of the cores; one for a small model.

    A small model's decode step is Python between tiny kernels: a second thread only spins there, and takes the core
    that the HTTP server, the router and the client need. Seen on two busy cores: 512 short requests in 2 s with one
    thread, in 60 s with two.
    """
    num_bytes = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    return 1 if num_bytes < SMALL_MODEL_BYTES else max(1, num_cores // num_engines)


def nodes_of_engine(slots: Sequence[Slot], name: str) -> list[Slot]:
    """The first slot of an engine on each of its nodes.

    Args:
        slots: of the engine, in order.
        name: of the engine, for messages.

    Raises:
        UsageError: the nodes have unequal shares, which SGLang cannot do.
    """
    shares = [list(share) for _, share in itertools.groupby(slots, key=lambda slot: slot.node)]
    if len({len(share) for share in shares}) > 1:
        found = ", ".join(f"{len(share)} on {share[0].node}" for share in shares)
        raise UsageError(
            f"{name} of {len(slots)} GPUs (slots) would have {found}, but it takes as many of each of its nodes: "
            "choose --rollout-num-gpus-per-engine and the trainer's GPUs so that engines begin where a node begins or "
            "end where it ends."
        )
    return [share[0] for share in shares]
