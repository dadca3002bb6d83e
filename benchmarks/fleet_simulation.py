"""Measure what a large fleet costs the processes that a run has once: fake engines and trainer ranks, on two cores.

    python benchmarks/fleet_simulation.py [--only PART ...] [--engines 1000] [--ranks 512] [--samples 100000]

health    a look of the watch over the engines (--use-fault-tolerance)
loads     a look at the engines' loads, for metrics
sync      pause, flush and continue on every engine, as in each weight sync
register  engines put behind a router at the start, one after the other
router    requests through one router to all engines, and by the same client without it
shares    100k samples cut for the ranks: CPU time, bytes of the object store
objects   the same through Ray's object store, and a call on every rank

The code is the product's; the engines are one process that listens at as many ports and answers each request at once,
so times hold half of its work, too. A part prints seconds of the clock and of this process's CPU. docs/performance/
scaling.md says what follows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.agent_gateway import http  # noqa: E402
from benchmarks.rollout_overhead import make_args  # noqa: E402
from slime.backends.megatron_utils.update_weight.engines import EngineFleet  # noqa: E402
from slime.backends.sglang_utils import server_control  # noqa: E402
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo  # noqa: E402
from slime.backends.sglang_utils.server_control import Worker  # noqa: E402
from slime.ray.rollout.router import Router, is_free  # noqa: E402
from slime.ray.rollout.shares import put_share, split_train_data  # noqa: E402
from slime.ray.rollout.watches import EngineLoads, EngineWatch  # noqa: E402
from slime.utils.train_data import flatten_columns  # noqa: E402

HOST, FIRST_PORT = "127.0.0.1", 18000
TOKENS, PROMPT = 512, 64
IN_FLIGHT, REQUESTS = 512, 4000
LOAD = {
    "num_running_reqs": 1,
    "num_waiting_reqs": 0,
    "gen_throughput": 80.0,
    "token_usage": 0.5,
    "cache_hit_rate": 0.0,
}
ANSWERS: dict[str, Any] = {
    "/v1/loads": {"loads": [LOAD]},
    "/server_info": {"tp_size": 1, "pp_size": 1, "model_path": "fake"},
    "/generate": {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}},
}


class FakeEngines:
    """Servers on ports one behind the other, which answer at once; the first also lists all, as a router does."""

    def __init__(self, count: int) -> None:
        self.urls = [f"http://{HOST}:{port}" for port in free_ports(count)]
        workers = {"workers": [{"url": url, "is_healthy": True} for url in self.urls]}
        self.bodies = {path: json.dumps(body).encode() for path, body in {**ANSWERS, "/workers": workers}.items()}

    def serve(self, is_ready: Any) -> None:
        """Answer until this process is ended."""
        asyncio.run(self._serve(is_ready))

    async def _serve(self, is_ready: Any) -> None:
        ports = [int(url.rpartition(":")[2]) for url in self.urls]
        servers = [await asyncio.start_server(self._answer, HOST, port, backlog=512) for port in ports]
        is_ready.set()
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = next((int(x.partition(b":")[2]) for x in lines if x.startswith(b"content-length:")), 0)
                await reader.readexactly(length)
                if head.startswith(b"PRI "):  # the router asks whether this is HTTP/2
                    break
                path = head.split(b" ", 2)[1].decode().partition("?")[0]
                writer.write(http("HTTP/1.1 200 OK", self.bodies.get(path, b"{}")))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def free_ports(count: int) -> list[int]:
    """So many ports that nobody has."""
    found = (port for port in range(FIRST_PORT, 32000) if is_free(HOST, port))
    return [next(found) for _ in range(count)]


@contextmanager
def running(count: int) -> Iterator[list[str]]:
    """Fake engines in a process of their own; yields their addresses."""
    engines, context = FakeEngines(count), multiprocessing.get_context("fork")
    is_ready = context.Event()
    process = context.Process(target=engines.serve, args=(is_ready,), daemon=True)
    process.start()
    try:
        if not is_ready.wait(60):
            raise RuntimeError("the fake engines did not start within a minute")
        yield engines.urls
    finally:
        process.kill()
        process.join(10)


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the clock and of this process's CPU."""
    start, cpu = time.monotonic(), time.process_time()
    work()
    return {"seconds": time.monotonic() - start, "cpu_s": time.process_time() - cpu}


def health(urls: list[str], options: Namespace) -> dict[str, float]:
    """A look at all engines; none is lost."""
    lost: list[Any] = []
    watch = EngineWatch(
        lambda: dict(enumerate(urls)), lambda *loss: lost.append(loss), interval_s=1, timeout_s=30, first_wait_s=0
    )
    return timed(watch.look) | {"engines_called_lost": float(len(lost))}


def loads(urls: list[str], options: Namespace) -> dict[str, float]:
    """A look at all loads, which are asked one after the other."""
    watch = EngineLoads(lambda: [urls[0]])
    found = timed(watch.tick)
    assert watch.take()["rollout/engine_loads/running"] == 1.0
    return found


def sync(urls: list[str], options: Namespace) -> dict[str, float]:
    """Time the calls that a weight sync makes to every engine, without the weights."""
    engines = [ExternalEngine(ExternalEngineInfo(url, 1), rank=rank) for rank, url in enumerate(urls)]
    fleet = EngineFleet(engines, deadline_s=120.0)

    def ask() -> None:
        for method in ("pause", "flush_cache", "continue_generation"):
            fleet.call(method, what=method)

    first = timed(ask)  # which starts threads and opens connections
    return {f"first_{name}": value for name, value in first.items()} | timed(ask)


@contextmanager
def a_router(work: Path) -> Iterator[str]:
    """The router of a run; yields its address."""
    values: dict[str, Any] = {"sglang_router_ip": None, "sglang_router_port": None}
    values |= {"router_overrides": {"policy": "round_robin"}}
    values |= {"sglang_router_request_timeout_secs": 60, "prometheus_port": None, "router_prometheus_port": None}
    router = Router(Namespace(**values), host=HOST, log_path=work / "router.log")  # type: ignore[arg-type]
    router.launch()
    try:
        router.wait_ready()
        yield router.address.url
    finally:
        router.shutdown()


def register(urls: list[str], options: Namespace) -> dict[str, float]:
    """Seconds for the first, and for an engine behind as many as `--register` says."""
    with tempfile.TemporaryDirectory() as work, a_router(Path(work)) as router:
        add = partial(server_control.register_worker_sync, router)
        each = [timed(partial(add, Worker(url))) for url in urls[: options.register]]
    seconds = [one["seconds"] for one in each]
    return {"first_s": seconds[0], "last_s": seconds[-1], "all_s": sum(seconds), "engines": float(len(each))}


def router(urls: list[str], options: Namespace) -> dict[str, float]:
    """Requests a second, through a router with some engines and without one."""
    found = {"direct_per_s": REQUESTS / timed(partial(_send_all, urls))["seconds"]}
    for count in sorted({1, 32, min(options.register, len(urls))}):
        with tempfile.TemporaryDirectory() as work, a_router(Path(work)) as address:
            for url in urls[:count]:
                server_control.register_worker_sync(address, Worker(url))
            seconds = timed(partial(_send_all, [address]))["seconds"]
        found[f"behind_{count}_per_s"] = REQUESTS / seconds
    return found


def _send_all(servers: list[str]) -> None:
    asyncio.run(_send([f"{url}/generate" for url in servers]))


async def _send(urls: list[str]) -> None:
    import aiohttp

    places, body = asyncio.Semaphore(IN_FLIGHT), {"input_ids": list(range(PROMPT)), "sampling_params": {}}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def one(number: int) -> None:
            async with places, session.post(urls[number % len(urls)], json=body) as answer:
                answer.raise_for_status()
                await answer.read()

        async with asyncio.timeout(300):
            await asyncio.gather(*(one(number) for number in range(REQUESTS)))


def train_data(num_samples: int) -> dict[str, Any]:
    """A rollout of samples of `TOKENS` tokens on average."""
    rng = random.Random(0)
    lengths = [rng.randrange(PROMPT + 1, 2 * TOKENS - PROMPT) for _ in range(num_samples)]
    responses = [length - PROMPT for length in lengths]
    return {
        "tokens": [[7] * length for length in lengths],
        "response_lengths": responses,
        "loss_masks": [[1] * length for length in responses],
        "rewards": [0.5] * num_samples,
        "raw_reward": [1.0] * num_samples,
        "truncated": [0] * num_samples,
        "sample_indices": list(range(num_samples)),
        "rollout_ids": list(range(num_samples)),
        "rollout_mask_sums": responses,
        "rollout_log_probs": [[-0.5] * length for length in responses],
    }


def _cutting(options: Namespace) -> Callable[[], list[dict[str, Any]]]:
    """Return the function that cuts a rollout for the ranks; its samples and flags are made once."""
    with tempfile.TemporaryDirectory() as work:
        args = make_args(Path(work) / "run", TOKENS)
    batch = {"global_batch_size": options.samples, "max_tokens_per_gpu": 16384, "use_dynamic_batch_size": True}
    args, data = args.replace(drop_last_rollouts=True, balance_data=True, **batch), train_data(options.samples)
    return lambda: split_train_data(args, data, {"dp_size": options.ranks, "cp_size": 1})


def shares(urls: list[str], options: Namespace) -> dict[str, float]:
    """CPU time of the rollout manager, its peak memory, and bytes of each rank's share."""
    found: list[dict[str, Any]] = []
    cut = _cutting(options)
    figures = timed(lambda: found.extend(cut()))
    flat = timed(lambda: [flatten_columns(share) for share in found])
    sizes = [sum(_num_bytes(column) for column in flatten_columns(share).values()) for share in found]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return figures | {"flatten_cpu_s": flat["cpu_s"], "store_gb": sum(sizes) / 1e9,
                      "share_mb": max(sizes) / 1e6, "peak_memory_gib": peak}  # fmt: skip


def _num_bytes(column: Any) -> int:
    values = getattr(column, "values", None)
    return int(values.nbytes) if values is not None and not callable(values) else sys.getsizeof(column)


def objects(urls: list[str], options: Namespace) -> dict[str, float]:
    """Shares put into Ray's object store, and one call on each of as many ranks (one actor stands for all)."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    try:
        rank = ray.remote(num_cpus=0)(_Rank).remote()
        ray.get(rank.take.remote(None), timeout=120)
        parts = _cutting(options)()
        boxes: list[Any] = []
        put = timed(lambda: boxes.extend(put_share(share, "object-store") for share in parts))
        calls = timed(lambda: ray.get([rank.take.remote(boxes) for _ in boxes], timeout=300))
    finally:
        ray.shutdown()
    return {"put_s": put["seconds"], "put_cpu_s": put["cpu_s"]} | {f"calls_{n}": value for n, value in calls.items()}


class _Rank:
    def take(self, boxes: Any) -> int:
        """Take the references of all ranks' shares, as a train step does."""
        return len(boxes or ())


PARTS: dict[str, Callable[[list[str], Namespace], dict[str, float]]] = {
    "health": health, "loads": loads, "sync": sync, "register": register, "router": router, "shares": shares,
    "objects": objects,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="parts to measure")
    parser.add_argument("--engines", type=int, default=1000, help="fake engines")
    parser.add_argument("--ranks", type=int, default=512, help="data-parallel trainer ranks")
    parser.add_argument("--samples", type=int, default=100_000, help="of a rollout")
    parser.add_argument("--register", type=int, default=200, help="engines that are put behind a real router")
    options = parser.parse_args()
    with running(options.engines) as urls:
        for name in options.only:
            figures = PARTS[name](urls, options)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{name}: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
