"""A scripted engine over real HTTP, and the flags that the rollout reads.

The fake answers /generate with a number of tokens that the prompt's last letter scripts, so that a test knows every
token, log-prob and finish reason in advance; it holds back the prompts in `held` until they are aborted, as an engine
holds a long generation. Everything else (HTTP client, semaphore, tasks, abort) is the real code.
"""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from slime.config.parse import FLAG_CLASSES
from slime.config.parser import defaults_of
from slime.config.prompt_sources import prompt_sources
from slime.utils.async_utils import cancel_all

A = ord("a")


class FakeEngine:
    """Router and engine in one: answers a prompt whose last letter is "a" + n with n tokens 100, 101, ..."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.held: set[int] = set()  # last letters whose generation ends only by an abort
        self.aborts = 0
        self.fail_with: tuple[int, str] | None = None
        self.fails_on: set[int] = set()  # last letters that alone fail; empty: all
        self.headers: list[dict[str, str]] = []
        self.resumes = False  # an input that begins with an earlier prompt goes on with that prompt's answer
        self.partial = 0  # tokens that a held prompt has when it is aborted
        self._prompts: list[list[int]] = []
        self.running = self.most_running = 0
        self._release: list[asyncio.Event] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        script, start = self._script(body["input_ids"])
        if self.fail_with and (not self.fails_on or script in self.fails_on):
            return web.Response(status=self.fail_with[0], text=self.fail_with[1])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        reason = "stop"
        count = script - A - start
        if script in self.held:
            self._release.append(asyncio.Event())
            await self._release[-1].wait()
            reason, count = "abort", min(self.partial, count)
        else:
            await asyncio.sleep(0.005)
        self.running -= 1
        if count >= body["sampling_params"]["max_new_tokens"]:
            reason, count = "length", body["sampling_params"]["max_new_tokens"]
        pairs = [[-0.5 - i, 100 + i, None] for i in range(start, start + count)]
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs, "completion_tokens": count}
        meta |= {"weight_version": "7", "prompt_tokens": len(body["input_ids"]), "cached_tokens": 1}
        return web.json_response({"text": "x" * count, "meta_info": meta})

    def _script(self, ids: list[int]) -> tuple[int, int]:
        """(the letter that scripts the answer, tokens of it that the input already has)."""
        if self.resumes:
            for prompt in self._prompts:
                if ids[: len(prompt)] == prompt:
                    return prompt[-1], len(ids) - len(prompt)
            self._prompts.append(ids)
        return ids[-1], 0

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        for event in self._release:
            event.set()
        return web.json_response({})

    async def workers(self, request: web.Request) -> web.Response:
        worker = {"id": "0", "url": self.url, "worker_type": "regular", "is_healthy": True}
        return web.json_response({"workers": [worker], "total": 1})

    @contextmanager
    def serve(self) -> Iterator[FakeEngine]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/workers", self.workers)
        with serve(app) as port:
            self.url, self.port = f"http://127.0.0.1:{port}", port
            yield self


@contextmanager
def serve(app: web.Application, **settings: Any) -> Iterator[int]:
    """Run an aiohttp application in a thread; yields its port."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1, **settings)
    listener = socket.create_server(("127.0.0.1", 0))

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        # A handler that still hangs would be found by the garbage collector, in the middle of another test.
        loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
        loop.close()


class LetterTokenizer:
    """One token per character, its code point: expected ids can be read off the prompt."""

    chat_template = "chatml"
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def __call__(self, texts: list[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False, **kwargs) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        text = f"[{len(tools)} tools]" + text if tools else text
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


DEFAULTS: dict[str, Any] = {
    name: value for flags_class in FLAG_CLASSES for name, value in defaults_of(flags_class).items()
}
"""The command line's own."""


def rollout_args(**changes: Any) -> Namespace:
    """The command line's defaults, small values, and what SGLang's flags and derived values are next to them."""
    flags: dict[str, Any] = {
        **copy.deepcopy(DEFAULTS),
        "hf_checkpoint": "letters",
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "sglang_model_routers": None,
        "sglang_server_concurrency": 64,
        "sglang_router_request_timeout_secs": 30,
        "sglang_enable_deterministic_inference": False,
        "sglang_speculative_algorithm": None,
        "sglang_dp_size": 1,
        "router_policy": "cache_aware",
        "vocab_size": None,
        "rollout_num_gpus": 1,
        "rollout_num_engines": 1,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 20,
        "custom_rm_path": "tests.unit.rollout_fakes:reward_response_length",
        "eval_datasets": [],
        "tool_key": None,
        "global_batch_size": 4,
    }
    unknown = changes.keys() - flags.keys()
    assert not unknown, f"no such flag: {unknown}"
    args = Namespace(**{**flags, **changes})
    args.prompt_sources = prompt_sources(args)
    return args


async def reward_response_length(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """A reward that a test can compute: the response length (of each sample of a list)."""
    if isinstance(sample, list):
        return [float(entry.response_length) for entry in sample]
    return float(sample.response_length)
