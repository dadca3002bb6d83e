"""Tokens per second and start of one engine over the settings of SGLang that a run may choose.

    python benchmarks/gpu_engine_sweep.py [--model 0.6B] [--settings NAME ...] [--at-once 3]
    python benchmarks/gpu_engine_sweep.py --tiny

Each setting is an engine of its own (random weights), asked directly for log-probs with all requests in flight: 512
prompts of 64 digits in groups of 8, which get responses of one length, then of log-normal lengths with a heavy tail.
`--at-once` engines of a GPU start side by side, so that their imports and captures overlap; then they are measured in
turn, round by round, and each GPU of the machine takes its share of the settings. Medians of --rounds after one that
warms up; the prefix cache is flushed before each. The host of a GPU may be 1.3 times as slow a minute later: compare
settings that were measured in turn.

The first setting, SGLang's own 52 sizes of decode graphs, is what the others are compared with. Target: the sizes that
slime chooses decode at least 0.98 times as fast. A setting that the machine cannot do is a row that says why.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fixed_length import drawn_length  # noqa: E402
from benchmarks.gpu_models import PROMPT_TOKENS, prepare_model, write_prompts  # noqa: E402
from benchmarks.gpu_runs import Row, line_of, make_parser, not_measured, parse_options, report  # noqa: E402
from slime.backends.sglang_utils.server_args import decode_graph_sizes, device_defaults  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine  # noqa: E402
from slime.processes.registry import registry  # noqa: E402
from slime.ray.rollout.router import reserve_block  # noqa: E402

HOST, GROUP, TARGET = "127.0.0.1", 8, 0.98
ALL_SIZES = "all 52 sizes"
PLAIN: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    ALL_SIZES: {"cuda_graph_max_bs_decode": 512},
    "our sizes": {},
    "prefill graphs": {"disable_prefill_cuda_graph": False},
    "no overlap": {"disable_overlap_schedule": True},
    "flashinfer": {"attention_backend": "flashinfer"},
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "flashinfer sampling": {"sampling_backend": "flashinfer"},
    "chunks of 2048": {"chunked_prefill_size": 2048},
    "256 running": {"max_running_requests": 256},
    "fa3": {"attention_backend": "fa3"},
}
"""Name -> changes of `PLAIN` with the decode sizes that slime chooses."""
USUAL = list(SETTINGS)[:6]
LOADS = ("fixed", "heavy-tailed")
BLOCKS: list[Any] = []
"""Ports of the engines, held to the end."""
Rates = dict[str, float]


def main() -> None:
    parser = make_parser(__doc__, "gpu_engine_sweep")
    parser.add_argument("--model", default="0.6B", choices=["0.6B", "1.7B", "4B"])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=USUAL)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument(
        "--response", type=int, default=256, help="tokens; the longest of the heavy tail is 4 times it"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=3, help="engines of a GPU that start together")
    options = parse_options(parser)
    if options.tiny:
        options.model, options.requests, options.response, options.at_once = "tiny", 16, 8, 2
        options.settings = [ALL_SIZES, "chunks of 2048"]
    options.benchmark = f"gpu_engine_sweep-{options.model}"
    model = prepare_model(options.model, options.output / "models", device=options.accelerator)
    registry()  # in this thread, the main one: no other can catch signals
    gpus = [] if options.tiny else visible_gpus()
    count = max(1, len(gpus))
    size = -(-len(options.settings) // count)  # neighbours are compared: they get the same GPU
    shares = [options.settings[first : first + size] for first in range(0, len(options.settings), size)]
    with ThreadPoolExecutor(count) as threads:
        parts = threads.map(lambda at: sweep(model, shares[at], at, options), range(len(shares)))
        found = {name: result for part in parts for name, result in part.items()}
    sys.exit(report(judge(found, options), options))


def visible_gpus() -> list[str]:
    """The numbers of this machine's GPUs."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# ---- engines


def sweep(model: Path, names: Sequence[str], gpu: int, options: Namespace) -> dict[str, Rates | str]:
    """Measure the settings of one GPU: tokens/s by load with the seconds of its start, or why there are none."""
    found: dict[str, Rates | str] = {}
    for first in range(0, len(names), options.at_once):
        wave = names[first : first + options.at_once]
        engines = [make_engine(model, name, gpu, options) for name in wave]
        with ThreadPoolExecutor(len(wave)) as starting:
            started = list(starting.map(lambda engine: start(engine, options), engines))
        rates = rates_of([engine for engine, (_, why) in zip(engines, started, strict=True) if not why], options)
        for name, engine, (seconds, why) in zip(wave, engines, started, strict=True):
            found[name] = why or {"start": seconds, **rates[engine.url]}
            print(f"{name}: {found[name]}", flush=True)
        for engine in engines:
            engine.shutdown()
    return found


def make_engine(model: Path, name: str, gpu: int, options: Namespace) -> SGLangEngine:
    """An engine with room for all requests at once, beside others of its GPU; not started."""
    block = reserve_block(HOST)
    BLOCKS.append(block)
    longest = PROMPT_TOKENS + 4 * options.response
    settings: dict[str, Any] = {
        "model_path": str(model), "host": HOST, "port": block[0], "nccl_port": block[1], "skip_server_warmup": True,
        "max_running_requests": options.requests, "context_length": longest + 64,
        "max_total_tokens": options.requests * (PROMPT_TOKENS + options.response) + 16384,
        **device_defaults(options.accelerator, model),
    }  # fmt: skip
    if not options.tiny:
        graphs = {"cuda_graph_bs_decode": decode_graph_sizes(options.requests)}
        settings |= {"base_gpu_id": gpu, "mem_fraction_static": 0.9, **PLAIN, **graphs}
        if name == ALL_SIZES:
            del settings["cuda_graph_bs_decode"]
    settings |= SETTINGS[name] if not options.tiny or name != ALL_SIZES else {}
    log = options.output / "engines" / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return SGLangEngine(settings, rank=0, log_path=log, accelerator=options.accelerator, num_threads=1)


def start(engine: SGLangEngine, options: Namespace) -> tuple[float, str]:
    """Start an engine; returns (seconds, why it did not)."""
    begin = time.monotonic()
    try:
        engine.start(options.timeout)
    except EngineStartError as error:
        return 0.0, " / ".join(str(error).split("\n")[-3:])[-300:]
    return time.monotonic() - begin, ""


# ---- requests


def rates_of(engines: Sequence[SGLangEngine], options: Namespace) -> dict[str, Rates]:
    """Tokens per second by load, of each engine by its URL."""
    found: dict[str, Rates] = {engine.url: {} for engine in engines}
    for load in LOADS:
        bodies = requests_of(load, options)
        tokens = sum(body["sampling_params"]["max_new_tokens"] for body in bodies)
        seconds: dict[str, list[float]] = {engine.url: [] for engine in engines}
        for _ in range(options.rounds + 1):
            for engine in engines:
                engine.flush_cache()
                begin = time.perf_counter()
                answers = asyncio.run(ask(engine.url, bodies))
                seconds[engine.url].append(time.perf_counter() - begin)
                assert sum(answer["meta_info"]["completion_tokens"] for answer in answers) == tokens
        for url, of_engine in seconds.items():
            found[url][load] = tokens / statistics.median(of_engine[1:])
            print(f"{url}, {load}: {[round(tokens / each) for each in of_engine]} tok/s", flush=True)
    return found


def requests_of(load: str, options: Namespace) -> list[dict[str, Any]]:
    """The bodies of all requests: groups of a prompt, with the tokens that the load wants of each."""
    path = write_prompts(options.output / "prompts.jsonl", options.requests // GROUP)
    prompts = [orjson.loads(line)["prompt"] for line in path.read_text().splitlines()]
    lengths = [options.response] * options.requests
    if load == "heavy-tailed":
        lengths = [drawn_length(number, 4 * options.response) for number in range(options.requests)]
    return [
        {
            "text": prompts[number // GROUP],
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0},
            "return_logprob": True,
        }
        for number, length in enumerate(lengths)
    ]


async def ask(url: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Send all requests at once; returns the answers."""
    connector = aiohttp.TCPConnector(limit=len(bodies))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def one(body: dict[str, Any]) -> Any:
            async with session.post(f"{url}/generate", data=orjson.dumps(body), headers=JSON) as answer:
                answer.raise_for_status()
                return orjson.loads(await answer.read())

        return await asyncio.gather(*map(one, bodies))


JSON = {"Content-Type": "application/json"}


# ---- the report


def judge(found: dict[str, Rates | str], options: Namespace) -> list[Row]:
    """A row for each setting and load, compared with SGLang's own sizes."""
    base, rows = found.get(ALL_SIZES), []
    for name, result in found.items():
        target = f">= {TARGET}" if name == "our sizes" else "printed"
        if isinstance(result, str):
            rows.append(not_measured(f"engine: {name}", options.model, target, f"not available: {result}"))
            continue
        for load in LOADS:
            limit = base[load] if isinstance(base, dict) else None
            ratio = result[load] / limit if limit else None
            holds = ratio is not None and (ratio >= TARGET or name != "our sizes")
            what, figure = f"engine: {name}, {load}", f"{result[load]:,.0f} tok/s"
            compared = f"{limit:,.0f} tok/s" if limit else ""
            note = f"started in {result['start']:.0f} s beside {options.at_once - 1} others"
            shape = f"{options.model}, {options.requests} requests"
            rows.append(Row(what, shape, figure, compared, ratio, target, holds, note))
    for row in rows:
        print(line_of(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
