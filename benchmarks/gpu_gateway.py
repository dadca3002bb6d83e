"""Tokens per second of agents through the gateway, beside a bare client of the same engines.

    python benchmarks/gpu_gateway.py [--engines 2] [--sessions 256] [--turns 4] [--rounds 3]
    python benchmarks/gpu_gateway.py --tiny

Conversations of several turns, all sessions at once: each turn adds 64 tokens of a tool's output and 256 of the model;
once with 256 in every session, whose turns then all end at the same moment, and once with 128 to 384 (--spread), as
those of real agents differ.
One side speaks Chat Completions to the gateway, which keeps the tokens; the other sends the same tokens straight to
/generate behind the same router (with log-probs, too). Clients of both sides are a process of their own, as agents
are. The sides take turns; engines forget their prefixes between rounds. Target: median of the rounds' ratios,
gateway / bare in tokens/s, at least 0.97.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_model, run_python, write_prompts  # noqa: E402
from benchmarks.gpu_runs import Row, make_parser, parse_options, report  # noqa: E402
from benchmarks.rollout_overhead import flush, median_ratio, rounded, running_engines  # noqa: E402

TARGET = 0.97
TOOL_TOKENS = 64


def main() -> None:
    if "--client" in sys.argv:
        asyncio.run(serve_orders())
        return
    parser = make_parser(__doc__, "gpu_gateway")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spread", type=float, nargs="*", default=[0.0, 0.5], help="of a turn's tokens, as a share")
    options = parse_options(parser)
    shape, options.new, options.context = ("tiny", 8, 64) if options.tiny else ("0.6B", 256, 1024)
    with tempfile.TemporaryDirectory() as work:
        args = make_args(options, Path(work), shape)
        with running_engines(args, Path(work), options.engines) as workers:
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
            rows = [row_of(options, spread, shape, *rates(options, spread, url, workers)) for spread in options.spread]
    sys.exit(report(rows, options))


def row_of(options: argparse.Namespace, spread: float, shape: str, through: list[float], bare: list[float]) -> Row:
    """The row of one spread, printed as soon as it is there."""
    ratio = median_ratio(through, bare)
    lengths = f"{options.new} +- {spread * options.new:.0f}" if spread else f"{options.new}"
    print(f"{lengths} tokens: through the gateway {rounded(through)} tok/s, bare {rounded(bare)} tok/s", flush=True)
    return Row(
        what=f"agents through the gateway / a bare client, {options.engines} engine(s)",
        shape=f"{shape}, {options.sessions} sessions x {options.turns} turns x {lengths} tokens",
        figure=f"{statistics.median(through):,.0f} tok/s",
        limit=f"{statistics.median(bare):,.0f} tok/s",
        ratio=ratio,
        target=f">= {TARGET}",
        holds=ratio >= TARGET,
        note=f"median of {options.rounds} rounds",
    )


def lengths_of(options: argparse.Namespace, spread: float) -> list[int]:
    """Tokens of each session's turns: evenly from new * (1 - spread) to new * (1 + spread), in an order by chance."""
    steps = max(1, options.sessions - 1)
    lengths = [round(options.new * (1 + spread * (2 * i / steps - 1))) for i in range(options.sessions)]
    random.Random(0).shuffle(lengths)
    return lengths


def make_args(options: argparse.Namespace, work: Path, shape: str) -> Any:
    """The flags of a run that only generates, with room for every session's last turn."""
    from slime.config.parse import parse_args

    model = options.output / "models" / "tiny-512"  # ids of the chat template's tokenizer go beyond the tiny model's
    if options.tiny:
        run_python("tools/make_tiny_model.py", "--output", str(model), "--vocab-multiple", "512")
    else:
        model = prepare_model(shape, options.output / "models", device=options.accelerator)
    flags = [
        "--accelerator", options.accelerator, "--debug-rollout-only", "--rollout-num-gpus", options.engines,
        "--hf-checkpoint", model, "--prompt-data", write_prompts(work / "prompts.jsonl", 1), "--input-key", "prompt",
        "--num-rollout", 1, "--rollout-batch-size", 1, "--n-samples-per-prompt", 8, "--global-batch-size", 8,
        "--rollout-max-response-len", options.new, "--rm-type", "random", "--output-dir", work / "out",
        "--sglang-server-concurrency", options.sessions,
        *(shlex.split(options.engine_flags) if options.accelerator == "cuda" else []),
        *shlex.split(options.extra_flags),
    ]  # fmt: skip
    return parse_args(argv=list(map(str, flags)))


def rates(options: argparse.Namespace, spread: float, url: str, workers: list[str]) -> tuple[list[float], list[float]]:
    """Tokens/s of both sides, round by round, after one that warms up."""
    from slime.agent.adapters.sessions import quiet_collector
    from slime.agent.gateway import Gateway
    from tests.rollout.chat_tokenizers import family_tokenizer

    tokenizer = family_tokenizer("qwen3")
    gateway = Gateway(tokenizer=tokenizer, sglang_url=url).start()
    quiet_collector()  # as a run's gateway does
    lengths = lengths_of(options, spread)
    sampling = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    tool = "line of a tool's output " * TOOL_TOKENS
    context = cut(tokenizer, tool * 16, options.context)
    # No two sessions begin alike: an engine would read what they share once, on that side alone.
    texts = [f"{number} {context}" for number in range(options.sessions)] + [cut(tokenizer, tool, TOOL_TOKENS)]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    found: dict[str, list[float]] = {"gateway": [], "bare": []}
    command = [sys.executable, __file__, "--client"]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    for number in range(options.rounds + 1):
        for side in ("gateway", "bare") if number % 2 else ("bare", "gateway"):
            flush(workers)
            wait_served(url)
            keys = [gateway.open_session(sampling=of_session) for of_session in sampling]
            order: dict[str, Any] = {"side": side, "keys": keys, "texts": texts}
            order["url"] = gateway.url if side == "gateway" else url
            order |= {"ids": ids, "turns": options.turns, "sampling": sampling}
            print(json.dumps(order), file=client.stdin, flush=True)
            if not (line := client.stdout.readline()):
                raise RuntimeError(f"the clients ended with {client.wait(30)} on the side {side!r}; see above")
            seconds = float(line)
            if side == "gateway":
                check(gateway, keys, [options.turns * length for length in lengths])
            found[side].append(options.turns * sum(lengths) / seconds)
    client.stdin.close()
    client.wait(30)
    gateway.stop()
    return found["gateway"][1:], found["bare"][1:]


def wait_served(url: str) -> None:
    """Wait until the router has found its engines healthy, a minute at most."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    end = time.monotonic() + 60
    while not (answer := httpx.post(f"{url}/generate", json=body, timeout=60)).is_success:
        assert time.monotonic() < end, answer.text
        time.sleep(0.2)


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The beginning of a text, about so many tokens long."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text[: int(len(text) * tokens / len(ids))]


def check(gateway: Any, keys: list[str], written: list[int]) -> None:
    """One sample a session, with every token that the model wrote in it (`written`), or AssertionError."""
    from slime.utils.types import Sample

    async def finish() -> list[list[Sample]]:
        return [await gateway.finish_session(key, base_sample=Sample(index=0)) for key in keys]

    for samples, tokens in zip(asyncio.run(finish()), written, strict=True):
        assert len(samples) == 1, f"{len(samples)} samples of a session"
        trained = sum(samples[0].loss_mask or [])
        assert trained == tokens, f"{trained} trained tokens of a session, which wrote {tokens}"


# ---- the clients' process


async def serve_orders() -> None:
    """Do what each line of standard input says; prints the seconds that it took."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            agent = through_gateway if order["side"] == "gateway" else straight
            begin = time.perf_counter()
            await asyncio.gather(*(agent(session, order, number) for number in range(len(order["keys"]))))
            print(time.perf_counter() - begin, flush=True)


async def through_gateway(session: aiohttp.ClientSession, order: dict[str, Any], number: int) -> None:
    """An agent that knows Chat Completions only."""
    headers = {"Authorization": f"Bearer {order['keys'][number]}", "Content-Type": "application/json"}
    messages, tool = [{"role": "user", "content": order["texts"][number]}], order["texts"][-1]
    for _ in range(order["turns"]):
        body = orjson.dumps({"model": "m", "messages": messages})
        async with session.post(f"{order['url']}/v1/chat/completions", data=body, headers=headers) as answer:
            answer.raise_for_status()
            message = orjson.loads(await answer.read())["choices"][0]["message"]
        messages += [message, {"role": "user", "content": tool}]


async def straight(session: aiohttp.ClientSession, order: dict[str, Any], number: int) -> None:
    """The same tokens by hand."""
    ids, tool = order["ids"][number], order["ids"][-1]
    for _ in range(order["turns"]):
        body = orjson.dumps({"input_ids": ids, "sampling_params": order["sampling"][number], "return_logprob": True})
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{order['url']}/generate", data=body, headers=headers) as answer:
            answer.raise_for_status()
            meta = orjson.loads(await answer.read())["meta_info"]
        ids = [*ids, *(pair[1] for pair in meta["output_token_logprobs"]), *tool]


if __name__ == "__main__":
    main()
