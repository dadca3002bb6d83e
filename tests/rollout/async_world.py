"""A scripted engine for the fully async rollout, and a data source; tests that import `fresh` begin with new ones.

The engine is a custom generate function that a test lets go on call by call. It writes two tokens, the first with the
weights of its beginning, the second with those of its end, and answers like SGLang: it names only the latter.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import fully_async_rollout
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

Status = Sample.Status
GENERATE = f"{__name__}:scripted"  # by name: a path would load this file, and its engine, once more
GROUP = 2


class Engine:
    """Calls in flight, each ended by the test; `birth` remembers the true version of every token."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.version = 1
        self.calls: list[tuple[Sample, asyncio.Future[str]]] = []
        self.birth: dict[int, int] = {}  # token -> version of the weights that wrote it
        self.begun = 0

    async def generate(self, sample: Sample) -> Sample:
        self.begun += 1
        first = self._token()
        ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.calls.append((sample, ending))
        how = await ending
        if how == "crash":
            raise ValueError("the tool broke")
        tokens = [first] if how == "abort" else [first, self._token()]
        meta = {"finish_reason": {"type": how}, "weight_version": str(self.version), "prompt_tokens": 1}
        sample.tokens = sample.tokens or [0]
        sample.append_response_tokens(tokens=tokens, log_probs=[-1.0] * len(tokens), meta_info=meta, text="x")
        return sample

    def _token(self) -> int:
        token = len(self.birth) + 1
        self.birth[token] = self.version
        return token

    def end(self, index: int, how: str = "stop") -> None:
        self.calls.pop(index)[1].set_result(how)

    def end_all(self, how: str = "stop") -> None:
        while self.calls:
            self.end(0, how)


engine = Engine()
BOUND = {"max_weight_staleness": 0}


async def scripted(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await engine.generate(sample)


class Source:
    """Prompts without an end, numbered; what is given back is served first."""

    def __init__(self, args: Any) -> None:
        self.args, self.buffer, self.drawn = args, list[list[Sample]](), 0
        self.saved: dict[int, list[int | None]] = {}

    def get_samples(self, count: int) -> list[list[Sample]]:
        return [self.buffer.pop(0) if self.buffer else self._fresh() for _ in range(count)]

    def _fresh(self) -> list[Sample]:
        self.drawn += 1
        number, size = self.drawn - 1, self.args.n_samples_per_prompt
        return [Sample(group_index=number, index=number * size + i, prompt=f"p{number}") for i in range(size)]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.buffer += groups

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = [group[0].group_index for group in self.buffer]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    monkeypatch.setattr(fully_async_rollout, "progress_bar", lambda *_: nullcontext(SimpleNamespace(update=int)))
    forget()
    yield
    fully_async_rollout.stop_worker()
    forget()


def forget() -> None:
    for singleton in (GenerateState, WeightClock, fully_async_rollout.Workers):
        singleton.clear_instances()
    engine.reset()


def make(concurrency: int = 4, **flags: Any) -> tuple[AsyncRolloutWorker, Source]:
    defaults = {"rollout_batch_size": 2, "n_samples_per_prompt": GROUP, "custom_generate_function_path": GENERATE}
    args = rollout_args(**(defaults | flags))
    source = Source(args)
    return AsyncRolloutWorker(args, source, concurrency=concurrency), source


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(60):
        await asyncio.sleep(0)


def numbers(groups: list[list[Sample]]) -> list[int | None]:
    return [group[0].group_index for group in groups]


def scenario(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def collecting(worker: AsyncRolloutWorker, rollout_id: int) -> asyncio.Task[Any]:
    task = asyncio.create_task(fully_async_rollout.collect(worker, rollout_id))
    await settle()
    return task


def follow(first: int = 0, end: int = 100, interval: int = 1, version: int = 1) -> None:
    WeightClock().follow(SyncSchedule(first, end, interval))
    WeightClock().publish(version)
    engine.version = version


def sync() -> None:
    engine.version += 1
    WeightClock().publish(engine.version)
