"""Engines of one kind: Ray actors, started in parallel, each on ports found on its own node.

It does not know the router, nor the other groups of the run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils.engine_client import EngineContact
from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args
from slime.backends.sglang_utils.server_control import Worker
from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.ray.placement_group import ENGINE_SHARE
from slime.ray.rollout.ports import reserve_block
from slime.ray.utils import actor_env, in_bundle, slot_options

logger = logging.getLogger(__name__)

START_DEADLINE_S = {"cpu": 600.0, "cuda": 1800.0}  # a large model takes many minutes to load and to capture graphs
SHUTDOWN_DEADLINE_S = 30.0
MAX_STARTS = 3
# A server takes as many GPUs as it is large, so it has to see them all, not only its actor's own (HIP: AMD's).
SHOW_ALL_GPUS = {f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES": "1" for kind in ("CUDA", "HIP")}
SMALL_MODEL_BYTES = 100 * 2**20
# Offsets in an engine's block of ports; the server's own is 0. Behind the bootstrap port comes that for encoders.
NCCL_PORT, BOOTSTRAP_PORT, ENCODER_PORT, DIST_INIT_PORT = 1, 2, 3, 4
PORTS = (0, NCCL_PORT, BOOTSTRAP_PORT, ENCODER_PORT, DIST_INIT_PORT)


class EngineActor(SGLangEngine):
    """An engine that finds its ports and its GPUs where Ray has put it.

    Args:
        args: the run's flags.
        spec: which engine.
        host: address to listen on; None is this node's.
        log_path: file for the server's output.
        num_threads: OMP threads of a CPU server.
    """

    def __init__(self, args: Any, spec: EngineSpec, *, host: str | None, log_path: str, num_threads: int) -> None:
        super().__init__({}, rank=spec.rank, log_path=log_path, accelerator=args.accelerator, num_threads=num_threads)
        self._args = args
        self._spec = spec
        self._host = host or ray.util.get_node_ip_address()

    def contact(self) -> EngineContact:
        """How trainers reach this engine, and in which slot it is."""
        return dataclasses.replace(super().contact(), first_slot=self._spec.first_slot)

    def launch(self, deadline_s: float, encoder_urls: Sequence[str] = ()) -> Worker:
        """Start the server; one whose free port was snatched away is started again on others.

        Args:
            deadline_s: until it is healthy.
            encoder_urls: servers that encode images for it.

        Returns:
            what a router is to be told of it.

        Raises:
            EngineStartError: see `SGLangEngine.start`.
        """
        spec = dataclasses.replace(self._spec, encoder_urls=tuple(encoder_urls))
        device = _device_arguments(self._args.accelerator)
        end, tried = time.monotonic() + deadline_s, list[int]()
        while True:
            block = reserve_block(self._host, needed=PORTS, avoid=tried)
            place = EnginePlace(
                host=self._host,
                port=block[0],
                nccl_port=block[NCCL_PORT],
                bootstrap_port=block[BOOTSTRAP_PORT],
                dist_init_port=block[DIST_INIT_PORT],
            )
            self._server_kwargs = build_server_args(self._args, spec, place) | device
            try:
                url = self.start(max(0.0, end - time.monotonic()))
                bootstrap_port = self._server_kwargs.get("disaggregation_bootstrap_port")
                return Worker(url, spec.worker_type, bootstrap_port)
            except EngineStartError as error:
                tried.append(block.first)
                if not error.port_taken or len(tried) == MAX_STARTS:
                    raise
                logger.warning("a port of engine %d was taken; starting it on others", self.rank)
            finally:
                block.release()


def _device_arguments(accelerator: str) -> dict[str, Any]:
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
        placements: (placement group or None, index of its first bundle) of each engine.
        host: address the engines listen on; None is the address of the node each is on.
        log_dir: where `engine_<rank>.log` is written.
        num_threads: OMP threads of each CPU engine.
    """

    def __init__(
        self,
        args: Any,
        specs: Sequence[EngineSpec],
        placements: Sequence[tuple[Any, int]],
        *,
        host: str | None,
        log_dir: Path,
        num_threads: int,
    ) -> None:
        self._args = args
        self._seats = list(zip(specs, placements, strict=True))
        self._host, self._log_dir, self._num_threads = host, log_dir, num_threads
        self.engines = [self._create(*seat) for seat in self._seats]

    def _create(self, spec: EngineSpec, placement: tuple[Any, int]) -> Any:
        group, bundle = placement
        accelerator = self._args.accelerator
        extra = SHOW_ALL_GPUS if accelerator == "cuda" else {}
        options = slot_options(accelerator, ENGINE_SHARE) | {"runtime_env": {"env_vars": actor_env(extra)}}
        if group is not None:
            options["scheduling_strategy"] = in_bundle(group, bundle)
        log_path = str(self._log_dir / f"engine_{spec.rank}.log")
        return (
            ray.remote(EngineActor)
            .options(**options)
            .remote(self._args, spec, host=self._host, log_path=log_path, num_threads=self._num_threads)
        )

    def launch(self, encoder_urls: Sequence[str] = ()) -> list[ray.ObjectRef]:
        """Start every server at once; each reference becomes the server's `Worker` when it is healthy, or fails."""
        deadline_s = START_DEADLINE_S[self._args.accelerator]
        return [engine.launch.remote(deadline_s, list(encoder_urls)) for engine in self.engines]

    def replace(self, index: int, encoder_urls: Sequence[str] = ()) -> ray.ObjectRef:
        """End an engine that is of no use any more, and start another in its place; as of `launch`."""
        self.end(index)
        self.engines[index] = self._create(*self._seats[index])
        deadline_s = START_DEADLINE_S[self._args.accelerator]
        launched: ray.ObjectRef = self.engines[index].launch.remote(deadline_s, list(encoder_urls))
        return launched

    def end(self, index: int) -> None:
        """End one server and its actor."""
        _end([self.engines[index]])

    def shutdown(self) -> None:
        """End every server and its actor."""
        _end(self.engines)
        self.engines = []


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
