"""A scripted engine and a tokenizer without a template, for tests of slime.agent.adapters.

The engine is a real HTTP server that speaks SGLang's /generate: it "samples" the ids of the next text of its script,
and keeps what it was asked. So a test compares the ids of a sample with the ids that an engine saw and wrote, which no
part of the adapter can make up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from slime.agent.adapters import BaseAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.gateway import Gateway
from slime.utils.types import Sample

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("bash", "read")
]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("bash", "read")]
CALL = "<tool_call><function=bash><parameter=cmd>ls</parameter></function></tool_call>"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class FakeTokenizer:
    """One id per letter; like upstream's fake it has no `chat_template`, so every request is rendered."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, add_generation_prompt: bool) -> list[int]:
        turns = [f"<{m['role']}>{m['content']}{m.get('tool_calls') or ''}" for m in messages]
        return self.encode("".join(turns) + "<assistant>")


class ScriptedEngine:
    """Answers /generate with the ids of `texts`, one after the other; token i has log-prob -(i + 1) / 8."""

    def __init__(self, tokenizer: Any, texts: list[str], *, finish: str = "stop", delay_s: float = 0.0) -> None:
        self.tokenizer, self.texts, self.finish, self.delay_s = tokenizer, list(texts), finish, delay_s
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.outputs: list[list[int]] = []
        self.aborted: list[str] = []
        self.failures: list[tuple[int, str]] = []
        self.finishes: list[str] = []
        self.meta: dict[str, Any] = {}
        self.metas: list[dict[str, Any]] = []
        self.app = web.Application(client_max_size=2**26)
        self.app.router.add_post("/generate", self._generate)
        self.app.router.add_post("/abort_request", self._abort)

    async def _generate(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        await asyncio.sleep(self.delay_s)
        if self.failures:
            status, text = self.failures.pop(0)
            return web.Response(status=status, text=text)
        plain = isinstance(self.tokenizer, FakeTokenizer)
        text = self.texts.pop(0)
        ids = self.tokenizer.encode(text) if plain else self.tokenizer.encode(text, add_special_tokens=False)
        self.outputs.append(ids)
        finish = self.finishes.pop(0) if self.finishes else self.finish
        pairs = [[-(i + 1) / 8, token, None] for i, token in enumerate(ids)]
        meta = self.metas.pop(0) if self.metas else self.meta
        return web.json_response(
            {"meta_info": {**meta, "output_token_logprobs": pairs, "finish_reason": {"type": finish}}}
        )

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.json_response({})


@contextlib.contextmanager
def served(app: web.Application, **runner_kwargs: Any) -> Iterator[str]:
    """The address of an application that runs in a thread."""
    handle = run_app_in_thread(app, host="127.0.0.1", runner_kwargs=runner_kwargs)
    try:
        yield f"http://127.0.0.1:{handle.port}"
    finally:
        handle.stop()


@contextlib.contextmanager
def serving(
    kind: type[BaseAdapter],
    texts: list[str],
    *,
    tokenizer: Any = None,
    runner: dict[str, Any] | None = None,
    finish: str = "stop",
    delay_s: float = 0.0,
    **kwargs: Any,
) -> Iterator[tuple[BaseAdapter, str, ScriptedEngine]]:
    """(adapter, its address, the engine that it asks)"""
    tokenizer = tokenizer or FakeTokenizer()
    engine = ScriptedEngine(tokenizer, texts, finish=finish, delay_s=delay_s)
    with served(engine.app) as engine_url:
        adapter = kind(tokenizer=tokenizer, sglang_url=engine_url + "/", **kwargs)
        with served(adapter.app, **(runner or {})) as url:
            yield adapter, url, engine


@contextlib.contextmanager
def gateway(
    texts: list[str], *, tokenizer: Any = None, finish: str = "stop", delay_s: float = 0.0, **kwargs: Any
) -> Iterator[tuple[Gateway, ScriptedEngine]]:
    """(a gateway that serves, the engine that it asks)"""
    tokenizer = tokenizer or FakeTokenizer()
    engine = ScriptedEngine(tokenizer, texts, finish=finish, delay_s=delay_s)
    with served(engine.app) as engine_url:
        server = Gateway(tokenizer=tokenizer, sglang_url=engine_url, **kwargs).start()
        try:
            yield server, engine
        finally:
            server.stop()


def finish(adapter: BaseAdapter | Gateway, sid: str = "s", **kwargs: Any) -> list[Sample]:
    """Samples of a session; asked for from another event loop than the server's."""
    return asyncio.run(adapter.finish_session(sid, base_sample=Sample(index=0), **kwargs))


def raw(url: str, path: str, body: Any, **headers: str) -> tuple[int, str]:
    """(status, text) of a POST without a client of its own."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def openai_client(server, key):
    import openai  # takes a second

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def anthropic_client(server, key):
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def opened(server, **kwargs):
    return server.open_session(sampling={"temperature": 1.0}, **kwargs)


def send(server, path, key, body=None, **headers):
    body = {"messages": ASK, "max_tokens": 50} if body is None else body
    status, text = raw(server.url, path, body, Authorization=f"Bearer {key}", **headers)
    return status, json.loads(text)


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hung_up(server, key, body=None, attempt=0):
    """A client that sends a request and closes its connection at the end of the block."""
    data = json.dumps(body or {"messages": ASK}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n"
    head += f"X-Stainless-Retry-Count: {attempt}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    client.sendall(head.encode() + data)
    return client
