"""What a rollout records of each sample when its samples are dumped, and that it records nothing otherwise."""

from __future__ import annotations

import pytest

from slime.observability.trace_utils import trace_event
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState, generate_and_rm_group
from slime.utils import async_utils
from slime.utils.types import Sample
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args

PARAMS = {"max_new_tokens": 20, "temperature": 1.0}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield
    GenerateState.clear_instances()


@pytest.fixture
def run():
    with FakeEngine().serve() as engine:

        def group(samples: list[Sample], **flags) -> list[Sample]:
            args = rollout_args(sglang_router_port=engine.port, **flags)
            return async_utils.run(generate_and_rm_group(args, samples, dict(PARAMS)))

        yield group


async def custom_generate(args, sample, sampling_params):
    trace_event(sample, "a turn")
    return await generation.generate(args, sample, sampling_params)


async def reward_group(args, samples, **kwargs):
    return [1.0 for _ in samples]


def names(sample: Sample) -> list[str]:
    return [f"{event['type']} {event['name']}" for event in sample.trace["events"]]  # type: ignore[attr-defined]


ENGINE = ["span_start engine call", "span_end engine call"]


def test_a_dumped_sample_has_spans_of_generation_engine_call_and_reward(run):
    sample = run([Sample(index=4, group_index=2, prompt="pc")], save_debug_rollout_data="dumps/{rollout_id}.pt")[0]
    assert names(sample) == [
        *["span_start generate", *ENGINE, "span_end generate"],
        *["span_start reward", "span_end reward"],
    ]
    start, call, answered = sample.trace["events"][:3]
    assert call["parent_span_id"] == start["span_id"] and (call["sample_id"], call["group_id"]) == (4, 2)
    # The fake engine answers "c" with two tokens, of weight version 7.
    assert answered["attrs"]["sglang_completion_tokens"] == 2
    assert answered["attrs"]["sglang_weight_version"] == "7"
    assert answered["attrs"]["sglang_finish_reason"] == "stop"


def test_a_group_reward_is_a_span_of_every_sample(run):
    samples = [Sample(index=i, prompt="pb") for i in range(2)]
    flags = {"group_rm": True, "custom_rm_path": f"{__file__}:reward_group"}
    for sample in run(samples, save_debug_rollout_data="x", **flags):
        assert names(sample)[-2:] == ["span_start reward", "span_end reward"]


def test_nothing_is_recorded_without_a_dump_unless_user_code_does(run):
    assert "trace" not in vars(run([Sample(index=0, prompt="pb")])[0])
    flags = {"custom_generate_function_path": f"{__file__}:custom_generate"}
    assert "event a turn" in names(run([Sample(index=0, prompt="pb")], **flags)[0])


def test_an_aborted_sample_that_goes_on_is_at_its_next_attempt(run):
    sample = Sample(index=0, prompt="pb", status=Sample.Status.ABORTED)
    assert run([sample], save_debug_rollout_data="x")[0].trace["attempt"] == 1  # type: ignore[attr-defined]
