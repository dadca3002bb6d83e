"""The fully async rollout on a scripted engine: what becomes of groups."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from slime.rollout import fully_async_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.sampling.weight_versions import (
    SyncSchedule,
    note_begin,
    oldest_version,
    staleness_metrics,
    version_number,
)
from slime.utils.types import Sample
from tests.rollout.async_world import (  # noqa: F401 - fresh is used by all
    GROUP,
    Status,
    collecting,
    engine,
    follow,
    fresh,
    make,
    numbers,
    scenario,
    settle,
    sync,
)
from tests.unit.rollout_fakes import rollout_args

# ---- arithmetic of versions


def test_a_version_is_the_last_sync_that_was_complete():
    assert [version_number(text) for text in ("3", "3.0", "3.12", "default", "", "x.1")] == [3, 2, 2, None, None, None]
    assert version_number("-2") == -2, "of a run before this one"


def test_a_rollout_is_trained_at_the_version_of_the_syncs_before_it():
    # Syncs follow rollouts 1, 3 and 5, and the first was before rollout 0.
    assert [SyncSchedule(0, 9, 2).version_at(i) for i in range(6)] == [1, 1, 2, 2, 3, 3]
    # A run that is resumed at 3 starts with version 1 and syncs after 3.
    assert [SyncSchedule(3, 9, 2).version_at(i) for i in range(3, 7)] == [1, 2, 2, 3]
    assert [SyncSchedule(3, 9, 2, 5).version_at(i) for i in range(3, 7)] == [5, 6, 6, 7], "after four syncs before"


def test_the_version_at_which_generating_began_is_noted_where_the_answers_hide_it():
    samples = [Sample(weight_versions=list(seen), response_length=1) for seen in (["2"], ["3"], [], ["1", "3"])]
    note_begin(samples, 2)
    assert [sample.weight_versions for sample in samples] == [["2"], ["2", "3"], ["2"], ["1", "3"]]
    untouched = Sample(weight_versions=["3"])
    note_begin([untouched], None)
    note_begin([untouched], 2)
    assert untouched.weight_versions == ["3"], "the version is unknown, or nothing was generated"


def test_staleness_is_that_of_the_oldest_token_of_each_sample():
    samples = [Sample(weight_versions=versions) for versions in (["3"], ["1", "3"], ["default"])]
    expected = {"rollout/weight_staleness/mean": (0 + 2) / 2, "rollout/weight_staleness/max": 2.0}
    assert staleness_metrics(samples, 3) == expected
    assert staleness_metrics(samples, None) == {}


# ---- groups


def test_groups_stay_in_flight_when_a_rollout_ends_and_belong_to_the_next_one():
    async def run() -> None:
        worker, source = make(concurrency=3)
        first = await collecting(worker, 0)
        assert (engine.begun, source.drawn) == (3 * GROUP, 3), "never more than the worker's concurrency"
        engine.end_all()
        await settle()
        assert numbers(first.result().samples) == [0, 1]
        assert worker.queue_size() == 1, "group 2 is finished already"
        assert {call[0].group_index for call in engine.calls} == {3, 4, 5}
        second = await collecting(worker, 1)
        assert not second.done()
        engine.end_all()
        await settle()
        assert numbers(second.result().samples)[0] == 2, "what is finished first is used first"
        await worker.end()

    scenario(run())


def test_a_full_queue_holds_the_worker_back_and_taking_groups_lets_it_go_on():
    async def run() -> None:
        worker, source = make(concurrency=2)
        worker.launch()
        await settle()
        for _ in range(5):
            engine.end_all()
            await settle()
        assert worker.queue_size() >= 2 and not engine.calls
        drawn = source.drawn
        await worker.next_group()
        await worker.next_group()
        worker.fill()
        await settle()
        assert engine.calls and source.drawn > drawn
        await worker.end()

    scenario(run())


def test_a_crashed_group_is_retried_then_counted_reported_and_replaced(caplog):
    async def run() -> None:
        worker, source = make(concurrency=1, n_samples_per_prompt=1, max_group_retries=2, rollout_batch_size=1)
        task = await collecting(worker, 0)
        for attempt in range(1 + 2):
            assert [call[0].prompt for call in engine.calls] == ["p0"], attempt
            engine.end(0, "crash")
            await settle()
        assert [call[0].prompt for call in engine.calls] == ["p1"]
        engine.end(0)
        output = await task
        assert numbers(output.samples) == [1]
        assert output.metrics["rollout/fully_async/crashed_groups"] == 1
        assert output.metrics["rollout/fully_async/retried_groups"] == 2
        await worker.end()

    scenario(run())
    assert "the tool broke" in caplog.text and "sample 0 (prompt 0: 'p0')" in caplog.text


def test_groups_that_all_crash_end_the_rollout_instead_of_waiting_for_ever():
    async def run() -> None:
        worker, _ = make(concurrency=2, n_samples_per_prompt=1, max_group_retries=0, rollout_batch_size=1)
        task = await collecting(worker, 0)
        while not task.done():
            engine.end_all("crash")
            await settle()
        await worker.end()
        with pytest.raises(RuntimeError, match="17 groups crashed during rollout 0, each 1 time.*the tool broke"):
            task.result()

    scenario(run())


@pytest.mark.parametrize("partial", [False, True])
def test_an_aborted_group_goes_back_to_the_data_source_with_what_it_has_where_partial_rollout_says_so(partial):
    async def run() -> None:
        worker, _ = make(concurrency=1, n_samples_per_prompt=1, rollout_batch_size=1, partial_rollout=partial)
        task = await collecting(worker, 0)
        engine.end(0, "abort")
        await settle()
        (sample, _) = engine.calls[0]
        assert (sample.prompt, sample.response_length) == ("p0", 1 if partial else 0)
        engine.end(0)
        output = await task
        (group,) = output.samples
        assert output.metrics["rollout/aborted_ratio"] == 1 / 2, "one was aborted, one accepted"
        assert group[0].response_length == (3 if partial else 2), "one token before the abort, two after it"
        assert group[0].status is Status.COMPLETED
        await worker.end()

    scenario(run())


def test_a_group_that_is_aborted_for_ever_is_an_error():
    async def run() -> None:
        worker, _ = make(concurrency=1, n_samples_per_prompt=1, rollout_batch_size=1)
        task = await collecting(worker, 0)
        while not task.done():
            engine.end_all("abort")
            await settle()
        with pytest.raises(RuntimeError, match="prompt group 0 was aborted 11 times"):
            task.result()
        await worker.end()

    scenario(run())


def drop_even(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=group[0].group_index % 2 == 1, reason="even")


def test_the_dynamic_filter_drops_groups_and_others_take_their_place():
    async def run() -> None:
        worker, _ = make(concurrency=1, dynamic_sampling_filter_path=f"{__name__}:drop_even")
        task = await collecting(worker, 0)
        while not task.done():
            engine.end_all()
            await settle()
        assert numbers(task.result().samples) == [1, 3]
        assert task.result().metrics["rollout/dynamic_filter/drop_even"] == 2
        await worker.end()

    scenario(run())


# ---- old weights


def test_groups_that_could_only_become_too_old_are_not_begun_before_the_sync():
    async def run() -> None:
        follow()
        worker, source = make(concurrency=50, max_weight_staleness=1)
        task = await collecting(worker, 0)
        # Rollout r is trained at version 1 + r: of version 1, rollouts 0 and 1 may be begun, two groups each.
        assert source.drawn == 4
        engine.end_all()
        await task
        await settle()
        assert source.drawn == 4
        sync()
        await settle()
        assert source.drawn == 6, "now those of rollout 2 may be begun"
        await worker.end()

    scenario(run())


def test_a_group_that_took_too_long_begins_anew_and_is_counted():
    async def run() -> None:
        follow()
        worker, source = make(concurrency=50, max_weight_staleness=1)
        task = await collecting(worker, 0)
        slow = [i for i, (sample, _) in enumerate(engine.calls) if sample.group_index == 3]
        for index in reversed([i for i in range(len(engine.calls)) if i not in slow]):
            engine.end(index)
        await task  # groups 0 and 1; 2 is finished, 3 is slow
        sync()
        sync()  # twice, without rollout 1: as if the driver had skipped it
        task = await collecting(worker, 2)
        while not task.done():
            engine.end_all()
            await settle()
        metrics = task.result().metrics
        assert metrics["rollout/fully_async/stale_groups"] == 2, "2 and 3: version 1, trained at 3"
        assert min(oldest_version(group) for group in task.result().samples) >= 2
        await worker.end()

    scenario(run())


def test_no_group_is_begun_for_a_rollout_after_the_last():
    async def run() -> None:
        follow(end=2)
        worker, source = make(concurrency=50)
        await collecting(worker, 0)
        assert source.drawn == 2 * 2
        await worker.end()

    scenario(run())


# ---- the rollout function and the saved state


def answer_everything(stop: threading.Event) -> None:
    from slime.utils.async_utils import get_async_loop

    loop = get_async_loop().loop
    while not stop.wait(0.01):
        loop.call_soon_threadsafe(engine.end_all)


@pytest.fixture
def answering():
    stop = threading.Event()
    thread = threading.Thread(target=answer_everything, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join()


def test_the_rollout_function_returns_scored_groups_rollout_after_rollout_from_one_worker(answering):
    worker, source = make(sglang_server_concurrency=2)
    for rollout_id in range(3):
        output = generate_rollout_fully_async(worker.args, rollout_id, source)
        assert len(output.samples) == 2 and all(len(group) == GROUP for group in output.samples)
        assert all(sample.reward == 2.0 for group in output.samples for sample in group)
    assert fully_async_rollout.Workers().worker.data_buffer is source


def test_prompts_in_flight_are_saved_as_if_they_had_been_given_back(answering):
    worker, source = make(sglang_server_concurrency=3)
    used = numbers(generate_rollout_fully_async(worker.args, 0, source).samples)
    fully_async_rollout.save_data_source(source, 0)
    kept = numbers(source.buffer)
    assert sorted(used + source.saved[0]) == list(range(len(used) + len(source.saved[0]))), "no prompt is missing"
    assert source.saved[0], "something was in flight"
    assert kept == [] or set(kept) <= set(source.saved[0]), "the running source is as it was"


def test_the_verbs_of_the_worker_as_a_user_calls_them(answering):
    _, source = make()
    worker = AsyncRolloutWorker(source.args, source, concurrency=2)
    assert worker.get_completed_groups() == []
    worker.start()
    groups: list[list[Sample]] = []
    for _ in range(500):
        groups += worker.get_completed_groups(limit=1)
        if len(groups) >= 5:
            break
        threading.Event().wait(0.01)
    assert len(groups) == 5 and len(set(numbers(groups))) == 5
    worker.stop()
    assert worker.queue_size() >= 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_age_of_a_finished_group_is_looked_up_once(monkeypatch, deterministic):
    worker = AsyncRolloutWorker(rollout_args(deterministic=deterministic), None)
    asked: list[int] = []
    monkeypatch.setattr(fully_async_rollout, "oldest_version", lambda group: asked.append(1) or oldest_version(group))
    for number in range(50):
        group = [Sample(index=number, weight_versions=[str(number % 7)])]
        worker._finish(fully_async_rollout.Flight(group, group, number))
    taken = [worker._pop().number for _ in range(50)]
    assert taken == (list(range(50)) if deterministic else sorted(range(50), key=lambda number: (number % 7, number)))
    assert len(asked) == (0 if deterministic else 50)
