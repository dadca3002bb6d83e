"""The engines of one model: Ray actors, started in parallel, each on ports found on its own node.

It does not know the router.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils.server_args import build_server_args
from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.ray.placement_group import ENGINE_SHARE
from slime.ray.rollout.ports import reserve_block
from slime.ray.utils import actor_env, get, in_bundle, slot_options

logger = logging.getLogger(__name__)

START_DEADLINE_S = {"cpu": 600.0, "cuda": 1800.0}  # a large model takes many minutes to load and to capture graphs
SHUTDOWN_DEADLINE_S = 30.0
MAX_STARTS = 3
SMALL_MODEL_BYTES = 100 * 2**20
NCCL_PORT, DIST_INIT_PORT = 1, 2  # offsets in an engine's block of ports; the server's own is 0


class EngineActor(SGLangEngine):
    """An engine that finds its ports and its GPUs where Ray has put it.

    Args:
        args: the run's flags.
        rank: number of the engine.
        host: address to listen on; None is this node's.
        log_path: file for the server's output.
        num_threads: OMP threads of a CPU server.
    """

    def __init__(self, args: Any, *, rank: int, host: str | None, log_path: str, num_threads: int) -> None:
        super().__init__({}, rank=rank, log_path=log_path, accelerator=args.accelerator, num_threads=num_threads)
        self._args = args
        self._host = host or ray.util.get_node_ip_address()

    def launch(self, deadline_s: float) -> str:
        """Start the server; one whose free port was snatched away is started again on others.

        Returns:
            its address.

        Raises:
            EngineStartError: see `SGLangEngine.start`.
        """
        end, tried = time.monotonic() + deadline_s, list[int]()
        while True:
            block = reserve_block(self._host, needed=(0, NCCL_PORT, DIST_INIT_PORT), avoid=tried)
            self._server_kwargs = build_server_args(
                self._args,
                rank=self.rank,
                model_path=self._args.hf_checkpoint,
                host=self._host,
                port=block[0],
                nccl_port=block[NCCL_PORT],
                dist_init_port=block[DIST_INIT_PORT],
            ) | _device_arguments(self._args.accelerator)
            try:
                return self.start(max(0.0, end - time.monotonic()))
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"base_gpu_id": visible.split(",").index(first) if visible else int(first)}


class ServerGroup:
    """The engines of one model.

    Args:
        args: the run's flags.
        placements: (placement group or None, index of its first bundle) of each engine.
        host: address the engines listen on; None is the address of the node each is on.
        log_dir: where `engine_<rank>.log` is written.
    """

    def __init__(self, args: Any, placements: Sequence[tuple[Any, int]], *, host: str | None, log_dir: Path) -> None:
        self._args = args
        num_threads = threads_per_engine(Path(args.hf_checkpoint), os.cpu_count() or 1, len(placements))
        self.engines = [
            self._create(rank, placement, host=host, log_dir=log_dir, num_threads=num_threads)
            for rank, placement in enumerate(placements)
        ]
        self.urls: list[str] = []

    def _create(
        self, rank: int, placement: tuple[Any, int], *, host: str | None, log_dir: Path, num_threads: int
    ) -> Any:
        group, bundle = placement
        accelerator = self._args.accelerator
        # The server takes as many GPUs as it is large, so it has to see them all, not only the actor's own.
        extra = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if accelerator == "cuda" else {}
        options = slot_options(accelerator, ENGINE_SHARE) | {"runtime_env": {"env_vars": actor_env(extra)}}
        if group is not None:
            options["scheduling_strategy"] = in_bundle(group, bundle)
        return (
            ray.remote(EngineActor)
            .options(**options)
            .remote(
                self._args,
                rank=rank,
                host=host,
                log_path=str(log_dir / f"engine_{rank}.log"),
                num_threads=num_threads,
            )
        )

    def start(self) -> list[str]:
        """Start every server at once and wait until all are healthy.

        Returns:
            their addresses, in the order of `engines`.

        Raises:
            ActorFailure: a server failed to start (quotes its log); raised as soon as the first does.
        """
        deadline_s = START_DEADLINE_S[self._args.accelerator]
        refs = [engine.launch.remote(deadline_s) for engine in self.engines]
        self.urls = get(refs, f"the start of {len(refs)} engine(s)", deadline_s + 60.0)
        return self.urls

    def shutdown(self) -> None:
        """End every server and its actor."""
        refs = [engine.shutdown.remote() for engine in self.engines]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_DEADLINE_S)
        for engine in self.engines:
            ray.kill(engine)  # what did not answer dies with its actor
        self.engines = []


def threads_per_engine(model_path: Path, num_cores: int, num_engines: int) -> int:
    """OMP threads of each CPU engine: an equal share of the cores; one for a small model.

    A small model's decode step is Python between tiny kernels: a second thread only spins there, and takes the core
    that the HTTP server, the router and the client need. Seen on two busy cores: 512 short requests in 2 s with one
    thread, in 60 s with two.
    """
    num_bytes = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    return 1 if num_bytes < SMALL_MODEL_BYTES else max(1, num_cores // num_engines)
