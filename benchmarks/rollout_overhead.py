"""What our rollout loop costs: in one process without an engine, and beside a bare client of the same engines.

    nice -n -10 python benchmarks/rollout_overhead.py [--only process http] [--rounds 5] [--engines 1]

process   Groups of 8 samples, prompt 64 and response 64 tokens with log-probs, through data source, generate_rollout,
          a trivial reward and TrainData, on one core. Requests are written as JSON and every answer is read from
          JSON, but nothing is sent: it lies ready. Target: 5,000 samples/s.
http      2,048 requests of 16 new tokens by asyncio and aiohttp alone (write JSON, read JSON, keep the answers), and
          the same by generate_rollout with a trivial reward; each with 512 in flight, alternating, through the router
          to real engines on CPU. Target: median of the rounds' ratios, ours / bare in requests/s, at least 0.95.

Both print samples/s of each round, the medians and the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.backends.sglang_utils import server_control  # noqa: E402
from slime.backends.sglang_utils.engine_client import DirectEngine, EngineContact  # noqa: E402
from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from slime.config.args import publish_runtime  # noqa: E402
from slime.config.parse import parse_args  # noqa: E402
from slime.ray.rollout.router import Router, reserve_block  # noqa: E402
from slime.rollout.base_types import RolloutFnTrainOutput  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.rollout.sampling.engine_request import (  # noqa: E402
    call_budget,
    engine_payload,
    router_url,  # noqa: E402
)
from slime.rollout.sampling.generation import GenerateState  # noqa: E402
from slime.rollout.sglang_rollout import generate_rollout  # noqa: E402
from slime.rollout.train_data import post_process_rewards, samples_to_train_data  # noqa: E402
from slime.utils import http_utils  # noqa: E402

HOST = "127.0.0.1"
GROUP, PROMPT, RESPONSE, CONCURRENCY = 8, 64, 64, 512
REQUESTS = 2048
START_DEADLINE_S = {"cpu": 120.0, "cuda": 400.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=["process", "http"], default=["process", "http"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--http-response", type=int, default=16, help="tokens of a response of the part http")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if "process" in options.only:
            in_process(make_args(Path(work) / "process", RESPONSE), options)
        if "http" in options.only:
            beside_bare_client(make_args(Path(work) / "http", options.http_response), Path(work), options)


def make_args(work: Path, response: int) -> Any:
    """The flags of a run with a tiny model and 256 prompts of 64 characters, each of which is a token."""
    work.mkdir()
    model, prompts, rng = work / "model", work / "prompts.jsonl", random.Random(0)
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_model.py", "--output", model], check=True)
    rows = [{"prompt": "".join(rng.choices("0123456789+-=", k=PROMPT))} for _ in range(REQUESTS // GROUP)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    flags = [
        "--accelerator", "cpu", "--colocate", "--actor-num-gpus-per-node", 1, "--hf-checkpoint", model,
        "--model-args-from-hf", "--prompt-data", prompts, "--input-key", "prompt", "--num-rollout", 1,
        "--rollout-batch-size", REQUESTS // GROUP, "--n-samples-per-prompt", GROUP, "--global-batch-size", REQUESTS,
        "--rollout-max-response-len", response,
        "--rollout-ignore-eos", "--custom-rm-path", f"{Path(__file__).resolve()}:response_length", "--lr", "1e-6",
        "--sglang-server-concurrency", CONCURRENCY, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096,
        "--recompute-old-log-probs", "--output-dir", work / "out",
    ]  # fmt: skip
    return parse_args(argv=list(map(str, flags)))


async def response_length(args: Any, sample: Any, **_: Any) -> float:
    """A trivial reward."""
    return float(sample.response_length)


def load() -> str:
    """The machine's load, to judge the figures by."""
    return f"load of the last minute {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def in_process(args: Any, options: argparse.Namespace) -> None:
    """Print samples/s of the loop around an answer that lies ready."""
    answer = instant_answer(RESPONSE)

    async def instant(url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        return orjson.loads(answer)

    http_utils.set_post_transport(instant)
    source = RolloutDataSourceWithBuffer(args)
    rates: list[float] = []
    cpu_rates: list[float] = []
    gc.collect()
    gc.freeze()  # as RolloutManager does
    for rollout_id in range(options.rounds + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        output = generate_rollout(args, rollout_id, source)
        assert isinstance(output, RolloutFnTrainOutput)
        samples = [sample for group in output.samples for sample in group]
        data = samples_to_train_data(samples, *post_process_rewards(args, samples))
        rates.append(REQUESTS / (time.perf_counter() - begin))
        cpu_rates.append(REQUESTS / (time.process_time() - begin_cpu))
        assert len(data["tokens"]) == REQUESTS
        assert {len(tokens) for tokens in data["tokens"]} == {PROMPT + RESPONSE}
    http_utils.set_post_transport(None)
    rates, cpu_rates = rates[1:], cpu_rates[1:]  # the first loads the tokenizer
    print(f"process: {statistics.median(rates):.0f} samples/s, median of {rounded(rates)}")
    print(
        f"process: {statistics.median(cpu_rates):.0f} samples/s of CPU time, median of {rounded(cpu_rates)}; {load()}"
    )


def instant_answer(response: int) -> bytes:
    """What an engine answers to one request, with as many tokens and log-probs as were asked for."""
    rng = random.Random(1)
    pairs = [[-3.0 * rng.random(), rng.randrange(8, 100), None] for _ in range(response)]
    meta = {
        "id": "0" * 32, "finish_reason": {"type": "length", "length": response}, "prompt_tokens": PROMPT,
        "weight_version": "1", "completion_tokens": response, "cached_tokens": 0, "e2e_latency": 0.0,
        "output_token_logprobs": pairs,
    }  # fmt: skip
    return orjson.dumps({"text": "x" * response, "output_ids": [pair[1] for pair in pairs], "meta_info": meta})


def rounded(rates: list[float]) -> list[int]:
    """Whole numbers, for printing."""
    return [round(rate) for rate in rates]


def beside_bare_client(args: Any, work: Path, options: argparse.Namespace) -> None:
    """Print requests/s of both sides and their ratio."""
    ours, bare = rates_of_both(args, work, rounds=options.rounds, engines=options.engines)
    ratio = median_ratio(ours, bare)
    print(f"http: ours {statistics.median(ours):.0f} requests/s, median of {rounded(ours)}")
    print(f"http: bare {statistics.median(bare):.0f} requests/s, median of {rounded(bare)}")
    print(f"http: ours / bare {ratio:.3f}, {options.engines} engine(s); {load()}", flush=True)


def rates_of_both(args: Any, work: Path, *, rounds: int, engines: int) -> tuple[list[float], list[float]]:
    """Requests/s of our loop and of a bare client of the same engines, round by round, after one that warms up.

    Args:
        args: the flags of a run, `rollout_batch_size` x `n_samples_per_prompt` requests a rollout.
        work: where engines and router log.
        rounds: how many; each side goes first in turn.
        engines: how many.
    """
    source = RolloutDataSourceWithBuffer(args)
    requests = args.rollout_batch_size * args.n_samples_per_prompt
    ours: list[float] = []
    bare: list[float] = []
    with running_engines(args, work, engines) as workers:
        payloads = same_requests(args)
        for rollout_id in range(rounds + 1):
            flush(workers)
            if rollout_id % 2:
                bare.append(requests / seconds_of(bare_rollout, args, payloads))
                flush(workers)
            ours.append(requests / seconds_of(generate_rollout, args, rollout_id, source))
            if not rollout_id % 2:
                flush(workers)
                bare.append(requests / seconds_of(bare_rollout, args, payloads))
    return ours[1:], bare[1:]


def median_ratio(ours: list[float], bare: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))


def seconds_of(side: Callable[..., Any], *arguments: Any) -> float:
    """What a call takes."""
    begin = time.perf_counter()
    side(*arguments)
    return time.perf_counter() - begin


def flush(workers: list[str]) -> None:
    """Have the engines forget the prompts that they have seen."""
    for worker in workers:
        DirectEngine(EngineContact(0, worker)).flush_cache(30.0)


def same_requests(args: Any) -> list[dict[str, Any]]:
    """The bodies that our loop sends for the same prompts."""
    state, groups = GenerateState(args), RolloutDataSourceWithBuffer(args).get_samples(args.rollout_batch_size)
    bodies = []
    for sample in (sample for group in groups for sample in group):
        assert isinstance(sample.prompt, str)
        sample.tokens = list(state.encode(sample.prompt))
        params = call_budget(sample, state.sampling_params, max_context_len=None)
        bodies.append(engine_payload(sample, params or {}, state))
    return bodies


def bare_rollout(args: Any, payloads: list[dict[str, Any]]) -> list[Any]:
    """Send every request; returns the answers."""
    return asyncio.run(bare_client(args, payloads))


async def bare_client(args: Any, payloads: list[dict[str, Any]]) -> list[Any]:
    """Every request by aiohttp, as many at once as our loop has in flight."""
    url = f"{router_url(args)}/generate"
    connector = aiohttp.TCPConnector(limit=args.sglang_server_concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def one(payload: dict[str, Any]) -> Any:
            body = orjson.dumps(payload)
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                answer.raise_for_status()
                return orjson.loads(await answer.read())

        return await asyncio.gather(*map(one, payloads))


@contextlib.contextmanager
def running_engines(args: Any, work: Path, count: int) -> Iterator[list[str]]:
    """Start engines and a router, and name it in `args`; yields the engines' addresses."""
    router = Router(args, host=HOST, log_path=work / "router.log")
    blocks = [reserve_block(HOST) for _ in range(count)]
    engines = [make_engine(args, i, block, work) for i, block in enumerate(blocks)]
    try:
        router.launch()
        workers = [engine.start(deadline_s=START_DEADLINE_S[args.accelerator]) for engine in engines]
        router.wait_ready()
        for worker in workers:
            server_control.register_worker_sync(router.address.url, server_control.Worker(worker))
        address = (router.address.ip, router.address.port)
        publish_runtime(args, sglang_router_ip=address[0], sglang_router_port=address[1], sglang_model_routers={})
        GenerateState.clear_instances()
        yield workers
    finally:
        router.shutdown()
        for engine in engines:
            engine.shutdown()


def make_engine(args: Any, rank: int, block: Any, work: Path) -> SGLangEngine:
    """An engine, not started yet: on CPU with room for all requests, on CUDA as the flags say."""
    place = EnginePlace(HOST, port=block[0], nccl_port=block[1], bootstrap_port=block[2], dist_init_port=block[4])
    on_cpu = args.accelerator == "cpu"
    running = args.sglang_server_concurrency
    settings = (
        {"max_total_tokens": running * 256, "max_running_requests": running} if on_cpu else {"base_gpu_id": rank}
    )
    settings = dict(args.sglang_overrides) | settings
    kwargs = build_server_args(args, EngineSpec(rank, args.hf_checkpoint, settings=settings), place)
    log_path, threads = work / f"engine_{rank}.log", 1 if on_cpu else None
    return SGLangEngine(kwargs, rank=rank, log_path=log_path, accelerator=args.accelerator, num_threads=threads)


if __name__ == "__main__":
    main()
