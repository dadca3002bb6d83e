"""The examples' generate functions leave the event loop alone: no callback computes for long, with 256 samples."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from aiohttp import web

from examples.multi_agent.rollout_with_multi_agents import generate_with_multi_agents
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState, fresh_copy
from slime.utils import async_utils
from slime.utils.types import Sample
from tests.rollout import test_retool_example as retool
from tests.rollout import test_search_r1_example as search
from tests.rollout import test_tau_bench_example as tau
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.test_multi_turn import END, ScriptedModel
from tests.unit.rollout_fakes import rollout_args

LIMIT_S = 0.05
NUM_SAMPLES = 256
ASK = [{"role": "user", "content": "1+2?"}]


class SteadyModel(ScriptedModel):
    """Writes the reply of a sample's turn, whichever sample asks; the turn is what `turn_of` reads in its prompt."""

    def __init__(self, tokenizer, replies, turn_of) -> None:
        super().__init__(tokenizer, replies)
        self.turn_of = turn_of

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = self.replies[self.turn_of(self.tokenizer.decode(body["input_ids"])) % len(self.replies)]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.requests.append({})
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, token, None] for token in ids]}
        meta |= {"completion_tokens": len(ids), "weight_version": "1", "prompt_tokens": len(body["input_ids"])}
        return web.json_response({"text": text, "meta_info": meta})


def assistant_turns(prompt: str) -> int:
    return prompt.count("<|im_start|>assistant") - 1


async def found(**asked):
    return [{"document": {"contents": '"Anna"\nAnna lives in Kelo'}}]


async def printed(self, code):
    return "42"


EXAMPLES = {
    "tau-bench": (
        tau.gen.generate,
        tau.new_sample(),
        [text + END for text in tau.RIGHT],
        {"tau": {"env": "shop", "user_strategy": "script"}},
    ),
    "retool": (
        retool.gen.generate,
        retool.new_sample(),
        [retool.call("print(6*7)") + END, retool.ANSWER + END],
        retool.settings(),
    ),
    "search-r1": (
        search.gen.generate,
        Sample(index=1, prompt="<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n"),
        ["<search>Anna</search>", "<answer>Kelo</answer>" + END],
        {"search_r1": {"max_turns": 3}},
    ),
    "multi_agent": (
        generate_with_multi_agents,
        Sample(index=1, prompt=ASK, label="3"),
        ["\\boxed{3} Judgment: 1" + END],
        {"multi_agent": {"num_parallel": 2}},
    ),
}


@pytest.fixture
def callbacks(monkeypatch):
    """Seconds of processor time of every callback of a loop, by the thread that ran it."""
    spent: dict[int, list[tuple[float, str]]] = {}
    own = asyncio.Handle._run

    def measured(handle):
        begin = time.thread_time()
        own(handle)
        seconds = time.thread_time() - begin
        if seconds > LIMIT_S / 5:
            spent.setdefault(threading.get_ident(), []).append((seconds, repr(handle)))

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    gc.disable()  # a collection goes through all that this process has imported, inside whichever callback it falls
    yield spent
    gc.enable()


def test_a_callback_that_computes_for_long_is_noticed(callbacks):
    async def long():
        begin = time.thread_time()
        while time.thread_time() < begin + 2 * LIMIT_S:
            pass
        return threading.get_ident()

    assert max(callbacks[async_utils.run(long())])[0] > LIMIT_S


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_callback_of_an_example_computes_for_more_than_50_ms(monkeypatch, callbacks, name):
    function, sample, replies, custom = EXAMPLES[name]
    monkeypatch.setattr(search.gen, "local_search", found)
    monkeypatch.setattr(retool.tool.PythonSandbox, "execute_code", printed)
    tokenizer = family_tokenizer("qwen2_5")
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: tokenizer)
    turn_of = (lambda text: text.count("<information>")) if name == "search-r1" else assistant_turns
    with SteadyModel(tokenizer, replies, turn_of).serve() as model:
        flags = {"rm_type": "deepscaler", "custom_rm_path": None} if name == "multi_agent" else {}
        args = rollout_args(
            sglang_router_port=model.port, rollout_max_response_len=300, max_turns=8, tool_concurrency=32, **flags
        )
        vars(args).update(custom)

        first, *copies = [fresh_copy(sample) for _ in range(NUM_SAMPLES + 1)]

        async def one(given):
            return await function(args, given, dict(GenerateState(args).sampling_params), False)

        async def all_samples():
            await one(first)  # what is made once, at the first sample
            callbacks.clear()
            await asyncio.sleep(0)
            await asyncio.gather(*map(one, copies))
            return threading.get_ident()

        thread = async_utils.run(all_samples())
    GenerateState.clear_instances()
    assert len(model.requests) >= (NUM_SAMPLES + 1) * len(replies), "every sample had all its turns"
    assert [slow for slow in callbacks.get(thread, []) if slow[0] > LIMIT_S] == []
