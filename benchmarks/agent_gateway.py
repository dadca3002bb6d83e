"""Measure the gateway for agents: its CPU time of a turn by sessions and by context, and breaks per 1,000 turns.

    python benchmarks/agent_gateway.py [--turns 4000] [--family qwen3] [--tools 16]

The engine answers at once with 64 fixed ids over HTTP; engine and clients are another process. So the CPU time of this
process is all that the gateway adds to a turn: parsing, matching, tokenising, both sides of HTTP, recording. Beside it
stands the floor: a server of the same stack that forwards a turn's JSON and tokenises its new text, and keeps nothing.
Other work on the machine makes a turn cost up to 1.5 times as much CPU time (caches), the floor, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOL_TEXT = "line of a tool's output " * 8
OUTPUT = 64
Messages = list[dict[str, Any]]


async def read_http(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request or answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(length.partition(b":")[2]))


def http(first_line: str, body: bytes, *headers: str) -> bytes:
    """A request or an answer."""
    lines = [first_line, f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tools_of(count: int) -> dict[str, Any]:
    """Return the definitions of `count` tools as a request sends them, 2 KB each."""
    fields = {f"field_{number}": {"type": "string", "description": "What it says. " * 5} for number in range(8)}
    shown = {"description": "What the tool does. " * 60, "parameters": {"type": "object", "properties": fields}}
    named = [{"type": "function", "function": {"name": f"tool_{number}", **shown}} for number in range(count)]
    return {"tools": named} if named else {}


async def peer(ids: list[int], tools: dict[str, Any]) -> None:
    """The other process: the engine, and the clients that this one tells what to do."""
    pairs = [[-0.5, token, None] for token in ids]
    meta = {"output_token_logprobs": pairs, "finish_reason": {"type": "stop"}, "completion_tokens": len(ids)}
    answer = http("HTTP/1.1 200 OK", json.dumps({"meta_info": meta}).encode())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                await read_http(reader)
            except asyncio.IncompleteReadError:
                break
            writer.write(answer)
        writer.close()

    engine = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**26)
    print(engine.sockets[0].getsockname()[1], flush=True)
    clients: dict[str, Client] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        for key in order["keys"]:
            if key not in clients:
                clients[key] = Client(order["port"], key, order["context"], tools)
        began = time.perf_counter()
        await asyncio.gather(*(clients[key].run(order["turns"]) for key in order["keys"]))
        print(time.perf_counter() - began, flush=True)
        clients = {key: client for key, client in clients.items() if not order["is_last"]}


class Client:
    """An agent that sends its whole conversation, without thoughts, over one connection."""

    def __init__(self, port: int, key: str, context: str, tools: dict[str, Any]) -> None:
        self.port, self.key, self.tools = port, key, tools
        self.messages: Messages = [{"role": "user", "content": context}]
        self.connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, turns: int) -> None:
        """Make a number of turns."""
        self.connection = self.connection or await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        reader, writer = self.connection
        for _ in range(turns):
            body = json.dumps({"model": "m", "messages": self.messages, **self.tools}).encode()
            writer.write(
                http("POST /v1/chat/completions HTTP/1.1", body, f"Authorization: Bearer {self.key}", "Host: x")
            )
            message = json.loads(await read_http(reader))["choices"][0]["message"]
            self.messages += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": TOOL_TEXT},
            ]


def floor(tokenizer: Any, engine: str) -> Any:
    """Start a server that does for a turn only what every gateway has to; returns its handle."""
    from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
    from slime.rollout.sampling.engine_request import tokens_of
    from slime.utils.http_utils import post
    from slime.utils.processing_utils import encode_text

    async def answer(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        ids = encode_text(tokenizer, body["messages"][-1]["content"])
        turn = await post(f"{engine}/generate", {"input_ids": ids, "return_logprob": True})
        text = tokenizer.decode(tokens_of(turn["meta_info"])[0], skip_special_tokens=False)
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.Response(body=orjson.dumps({"choices": [choice]}), content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    keys = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger}
    return run_app_in_thread(app, host="127.0.0.1", runner_kwargs=keys)


class Bench:
    """A gateway before the other process.

    Args:
        family: whose chat template is used.
        tools: how many a request has.
    """

    def __init__(self, family: str, tools: int = 0) -> None:
        from slime.agent.adapters.sessions import quiet_collector
        from slime.agent.gateway import Gateway
        from tests.rollout.chat_tokenizers import family_tokenizer

        self.tokenizer = family_tokenizer(family)
        text = "<think>\nhm\n</think>\n\n" + "word " * OUTPUT
        self.ids = self.tokenizer.encode(text, add_special_tokens=False)[: OUTPUT - 1]
        self.ids += self.tokenizer.encode("<|im_end|>", add_special_tokens=False)
        command = [sys.executable, __file__, "--peer", json.dumps(self.ids), "--tools", str(tools)]
        self.peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        engine = f"http://127.0.0.1:{self._answer()}"
        self.gateway = Gateway(tokenizer=self.tokenizer, sglang_url=engine).start()
        self.floor = floor(self.tokenizer, engine)
        quiet_collector()  # as a run's gateway does

    def _answer(self) -> str:
        assert self.peer.stdout is not None
        return self.peer.stdout.readline().strip()

    def order(self, keys: list[str], context: str, turns: int, *, is_last: bool, port: int = 0) -> tuple[float, float]:
        """(CPU seconds of this process, seconds by the clock) of some turns in each session; port 0 is the gateway."""
        assert self.peer.stdin is not None
        port = port or self.gateway.port
        order = {"port": port, "keys": keys, "context": context, "turns": turns, "is_last": is_last}
        cpu = time.process_time()
        print(json.dumps(order), file=self.peer.stdin, flush=True)
        wall = float(self._answer())
        return time.process_time() - cpu, wall

    def context(self, tokens: int) -> str:
        """A text of so many tokens."""
        per_token = len(self.tokenizer.encode(TOOL_TEXT)) / len(TOOL_TEXT)
        return (TOOL_TEXT * (int(tokens / per_token) // len(TOOL_TEXT) + 1))[: int(tokens / per_token)]

    def floor_cost(self, sessions: int, tokens: int, turns: int) -> float:
        """us of CPU a turn of the server that only forwards and tokenises."""
        keys = [f"floor-{number}" for number in range(sessions)]
        self.order(keys, self.context(tokens), 1, is_last=False, port=self.floor.port)
        each = max(turns // sessions, 2)
        cpu, _ = self.order(keys, self.context(tokens), each, is_last=True, port=self.floor.port)
        return cpu / sessions / each * 1e6

    def row(self, sessions: int, tokens: int, turns: int) -> tuple[float, str]:
        """(us of CPU a turn, a row of the table): all sessions at once, their first turn not counted."""
        from slime.utils.types import Sample

        context = self.context(tokens)
        keys = [self.gateway.open_session(sampling={"temperature": 1.0}) for _ in range(sessions)]
        self.order(keys, context, 1, is_last=False)
        each = max(turns // sessions, 2)
        cpu, wall = self.order(keys, context, each, is_last=True)

        async def finish() -> list[Sample]:
            finished = [await self.gateway.finish_session(key, base_sample=Sample(index=0)) for key in keys]
            return [sample for samples in finished for sample in samples]

        samples = asyncio.run(finish())
        agents = [sample.metadata["agent"] for sample in samples]
        assert sum(agent["turns"] for agent in agents) == sessions * (each + 1), "a turn is lost or doubled"
        breaks = 1000 * sum(agent["breaks"] + agent["forks"] for agent in agents) / (sessions * (each + 1))
        cost = cpu / sessions / each * 1e6
        cells = (
            sessions,
            f"{tokens:,}",
            sessions * each,
            f"{cost:.0f}",
            f"{wall / sessions / each * 1e6:.0f}",
            breaks,
        )
        return cost, "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4000, help="of a row, spread over its sessions")
    parser.add_argument("--family", default="qwen3", help="whose chat template (tests/fixtures/chat_templates)")
    parser.add_argument("--tools", type=int, default=0, help="of a request, 2 KB each")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        asyncio.run(peer(json.loads(args.peer), tools_of(args.tools)))
        return
    bench = Bench(args.family, args.tools)
    costs = {}
    print("| sessions | tokens of context | turns | us CPU a turn | us by the clock | breaks per 1,000 turns |")
    print("|---|---|---|---|---|---|")
    for sessions, tokens, turns in ((1, 1000, 200), (100, 1000, args.turns), (256, 1000, args.turns),
                                    (1000, 1000, args.turns), (1, 100_000, 40), (4, 100_000, 40)):  # fmt: skip
        costs[sessions, tokens], row = bench.row(sessions, tokens, turns)
        print(row, flush=True)
    print(f"100k tokens / 1k tokens of context, one session: {costs[1, 100_000] / costs[1, 1000]:.1f}")
    print(f"1,000 sessions / 100 sessions: {costs[1000, 1000] / costs[100, 1000]:.2f}")
    least = bench.floor_cost(256, 1000, args.turns)
    print(f"256 sessions: {costs[256, 1000]:.0f} us (aim 600)")
    print(f"256 sessions of a server that only forwards and tokenises: {least:.0f} us")
    bench.gateway.stop()
    bench.floor.stop()
    bench.peer.kill()


if __name__ == "__main__":
    main()
