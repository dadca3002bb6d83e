"""What tests of the rollout share: fake reward services, and a loop over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.eval import EvalDatasets
from slime.rollout.rm_hub import service
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from tests.rollout.reward_fakes import Answer, FakeService
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args, serve


@pytest.fixture
def start_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], FakeService]]:
    """Starts fake services; the client does not wait between tries."""
    monkeypatch.setattr(service, "backoff_s", lambda attempt: 0.0)
    service.take_reward_failures()
    running = []

    def started(answer: Answer) -> FakeService:
        fake = FakeService(answer)
        app = web.Application()
        app.router.add_post("/{path:.*}", fake.handle)
        context = serve(app)
        fake.port = context.__enter__()
        running.append(context)
        return fake

    yield started
    for context in running:
        context.__exit__(None, None, None)


@pytest.fixture
def letters(monkeypatch):
    """Every tokenizer is LetterTokenizer, and the loop's state is new."""
    GenerateState.clear_instances()
    EvalDatasets.clear_instances()
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield
    GenerateState.clear_instances()
    EvalDatasets.clear_instances()


@pytest.fixture
def engine(letters):
    """A scripted engine over real HTTP that goes on with partial answers."""
    with FakeEngine().serve() as fake:
        fake.resumes = True
        yield fake


@pytest.fixture
def make(engine, tmp_path):
    """(args, data source) over prompts given as letters; letter n of the alphabet is answered with n tokens."""

    def build(prompts: str, **changes):
        GenerateState.clear_instances()
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"input": f"p{letter}"}) + "\n" for letter in prompts))
        values = {"prompt_data": str(path), "sglang_router_port": engine.port, "save": str(tmp_path), **changes}
        args = rollout_args(load=str(tmp_path), **values)
        return args, RolloutDataSourceWithBuffer(args)

    return build
