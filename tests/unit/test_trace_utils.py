"""Traces of samples: what is recorded, how spans nest, what crosses processes, and that tracing never raises."""

from __future__ import annotations

import asyncio
import copy
import json
import logging

import pytest

from slime.observability import trace_utils
from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    note_times,
    span_if_traced,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.utils.types import Sample

EVENT_KEYS = {
    *("type", "name", "ts", "trace_id", "sample_id", "group_id"),
    *("attempt", "span_id", "parent_span_id", "attrs"),
}


def events(sample: Sample) -> list[dict]:
    return sample.trace["events"]  # type: ignore[attr-defined]


def short(sample: Sample) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in events(sample)]


def test_a_span_is_a_start_and_an_end_with_the_attributes_known_at_each():
    sample = Sample(index=7, group_index=2)
    with trace_span(sample, "tool", attrs={"query": "1+1"}) as span:
        span.set("answer", 2)
        span.update({"cached": True})
    start, end = events(sample)
    assert set(start) == set(end) == EVENT_KEYS
    assert (start["type"], start["attrs"]) == ("span_start", {"query": "1+1"})
    assert (end["type"], end["attrs"]) == ("span_end", {"answer": 2, "cached": True})
    assert start["span_id"] == end["span_id"] and start["ts"] <= end["ts"]
    trace = sample.trace
    assert {key: trace[key] for key in ("version", "sample_id", "group_id", "attempt")} == {
        **{"version": 1, "sample_id": 7, "group_id": 2, "attempt": 0}
    }
    assert all(event["trace_id"] == trace["trace_id"] and event["sample_id"] == 7 for event in events(sample))


def test_what_happens_inside_a_span_is_its_child_also_in_tasks_and_nothing_after_it_is():
    first, second = Sample(index=0), Sample(index=1)

    async def turn(sample: Sample) -> None:
        with trace_span(sample, "turn"):
            await asyncio.sleep(0)
            trace_event(sample, "answered")

    async def group() -> None:
        with trace_span([first, [second]], "group"):
            await asyncio.gather(turn(first), turn(second))
        trace_event(first, "after")

    asyncio.run(group())
    for sample in (first, second):
        outer, inner, event = events(sample)[:3]
        assert outer["parent_span_id"] is None
        assert inner["parent_span_id"] == outer["span_id"]
        assert event["parent_span_id"] == inner["span_id"] and event["span_id"] is None
    assert events(first)[-1]["name"] == "after" and events(first)[-1]["parent_span_id"] is None
    assert events(first)[0]["span_id"] != events(second)[0]["span_id"]


def test_an_error_ends_the_span_passes_through_and_is_recorded_unless_told_not_to():
    sample = Sample()
    with pytest.raises(ValueError, match="no such tool"), trace_span(sample, "tool"):
        raise ValueError("no such tool")
    with pytest.raises(KeyError), trace_span(sample, "tool", record_error=False):
        raise KeyError("x")
    ends = [event["attrs"] for event in events(sample) if event["type"] == "span_end"]
    assert ends == [{"error": "ValueError: no such tool"}, {}]


def test_a_trace_survives_dicts_and_json():
    sample = Sample(index=1)
    trace_event(sample, "made", attrs={"shape": (2, 3), "object": object, 4: None})
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.trace == sample.trace  # type: ignore[attr-defined]
    assert events(again)[0]["attrs"]["shape"] == [2, 3]


def test_each_try_has_its_number():
    sample = Sample()
    trace_event(sample, "try")
    trace_next_attempt([sample])
    trace_event(sample, "try")
    assert [event["attempt"] for event in events(sample)] == [0, 1]


def test_a_traced_function_is_a_span_of_the_named_parameter():
    @trace_function("score", target="sample", attrs_getter=lambda args, sample, k=1: {"k": k})
    def score(args: object, sample: Sample, k: int = 1) -> int:
        return k + 1

    @trace_function("generate", target_getter=lambda state: state["sample"])
    async def generate(state: dict) -> str:
        trace_event(state["sample"], "inside")
        return "text"

    fixed = Sample()

    @trace_function("fixed", target=fixed)
    def other() -> None:
        raise RuntimeError("no")

    sample = Sample()
    assert score(None, sample=sample, k=4) == 5 and score.__name__ == "score"
    assert asyncio.run(generate({"sample": sample})) == "text"
    with pytest.raises(RuntimeError):
        other()
    assert short(sample) == [
        *[("span_start", "score"), ("span_end", "score")],
        *[("span_start", "generate"), ("event", "inside"), ("span_end", "generate")],
    ]
    assert events(sample)[0]["attrs"] == {"k": 4}
    assert events(fixed)[-1]["attrs"] == {"error": "RuntimeError: no"}


def test_another_process_adds_its_events_below_the_span_that_called_it():
    sample = Sample(index=5)
    with trace_span(sample, "remote call"):
        carrier = json.loads(json.dumps(export_trace(sample)))
        there = Sample(index=0)
        import_trace(there, carrier)
        with trace_span(there, "agent"):
            pass
        import_trace(sample, export_trace(there))
    assert short(sample) == [
        *[("span_start", "remote call"), ("span_start", "agent")],
        *[("span_end", "agent"), ("span_end", "remote call")],
    ]
    assert events(sample)[1]["parent_span_id"] == events(sample)[0]["span_id"]
    assert events(sample)[1]["sample_id"] == 5
    before = copy.deepcopy(sample.trace)  # type: ignore[attr-defined]
    import_trace(sample, carrier)
    import_trace(sample, None)
    assert sample.trace == before, "what is known is not doubled"  # type: ignore[attr-defined]
    assert export_trace(Sample()) is None


def test_a_stranger_s_trace_is_left_out(caplog):
    one, other = Sample(index=1), Sample(index=2)
    trace_event(one, "a")
    trace_event(other, "b")
    import_trace(one, export_trace(other))
    assert short(one) == [("event", "a")] and "another trace" in caplog.text


BROKEN = {
    "no attributes": lambda: trace_event(object(), "x"),
    "no object": lambda: trace_event(3, "x"),
    "a trace of somebody else": lambda: trace_event(Sample.from_dict({"trace": "mine"}), "x"),
    "attributes that are no mapping": lambda: trace_event(Sample(), "x", attrs=3),  # type: ignore[arg-type]
    "nothing to import": lambda: import_trace(Sample(), {"trace_id": 1}) or import_trace(3, {}),
    "an engine that says odd things": lambda: build_sglang_meta_trace_attrs(3),  # type: ignore[arg-type]
    "next attempt": lambda: trace_next_attempt(Sample.from_dict({"trace": {}})),
    "export": lambda: export_trace(3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_nothing_that_goes_wrong_in_tracing_is_raised(name, caplog):
    caplog.set_level(logging.WARNING)
    BROKEN[name]()


def test_a_function_is_called_although_its_span_cannot_be_made(caplog):
    @trace_function("f", target="nobody")
    def f(x: int) -> int:
        return x

    @trace_function("g", target_getter=lambda x: x.sample, attrs_getter=lambda x: 1 / 0)
    def g(x: int) -> int:
        with trace_span(x, "inside", attrs={"a": 1}) as span:
            span.update(None)  # type: ignore[arg-type]
        return x

    assert f(1) == 1 and g(2) == 2
    assert "no parameter 'nobody'" in caplog.text


def test_slime_s_own_spans_record_only_on_samples_that_are_traced():
    untraced, traced = Sample(), Sample()
    bind_trace(traced)
    for target in (untraced, traced, [untraced, traced], [untraced]):
        with span_if_traced(target, "generate") as span:
            span.set("a", 1)
            span.update({"b": 2})
        assert span.is_recorded == (target is traced or target == [untraced, traced])
    assert "trace" not in vars(untraced)
    assert short(traced) == [("span_start", "generate"), ("span_end", "generate")] * 2


def test_a_sample_keeps_a_bounded_number_of_events(monkeypatch):
    monkeypatch.setattr(trace_utils, "MAX_EVENTS", 3)
    sample = Sample()
    for _ in range(5):
        trace_event(sample, "again")
    assert len(events(sample)) == 3 and sample.trace["dropped_events"] == 2  # type: ignore[attr-defined]


def test_an_engine_s_answer_becomes_attributes():
    meta = {
        **{"id": "r1", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 5, "completion_tokens": 3},
        **{"weight_version": "4", "queue_time": 0.5, "e2e_latency": None, "output_token_logprobs": [[-1, 2, None]]},
    }
    assert build_sglang_meta_trace_attrs(meta) == {
        **{"sglang_id": "r1", "sglang_prompt_tokens": 5, "sglang_completion_tokens": 3},
        **{"sglang_weight_version": "4", "sglang_queue_time": 0.5, "sglang_finish_reason": "stop"},
    }
    assert build_sglang_meta_trace_attrs(None) == {}


def test_times_add_up_over_the_parts_of_a_sample(monkeypatch):
    sample = Sample()
    monkeypatch.setattr("slime.observability.trace_utils.time.time", lambda: 12.0)
    note_times([sample], "generation_s", 10.0)
    monkeypatch.setattr("slime.observability.trace_utils.time.time", lambda: 20.0)
    note_times([sample], "generation_s", 15.0)  # resumed
    note_times([sample], "reward_s", 19.0)
    assert sample.times == {"begin": 10.0, "end": 20.0, "generation_s": 2.0 + 5.0, "reward_s": 1.0}
