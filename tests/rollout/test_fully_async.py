"""The fully async rollout on a scripted engine: what becomes of groups, and that no trained token is ever too old.

The engine is a custom generate function that a test lets go on call by call. It writes two tokens, the first with the
weights of its beginning, the second with those of its end, and answers like SGLang: it names only the latter.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout import fully_async_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sampling.weight_versions import (
    SyncSchedule,
    WeightClock,
    note_begin,
    oldest_version,
    staleness_metrics,
    version_number,
)
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

Status = Sample.Status
GENERATE = f"{__name__}:scripted"  # by name: a path would load this file, and its engine, once more
GROUP = 2


class Engine:
    """Calls in flight, each ended by the test; `birth` remembers the true version of every token."""

    version = 1

    def __init__(self) -> None:
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
    global engine
    for singleton in (GenerateState, WeightClock, fully_async_rollout.Workers):
        singleton.clear_instances()
    engine = Engine()


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


def follow(first: int = 0, end: int = 100, interval: int = 1, version: int = 1) -> None:
    WeightClock().follow(SyncSchedule(first, end, interval))
    WeightClock().publish(version)
    engine.version = version


def sync() -> None:
    engine.version += 1
    WeightClock().publish(engine.version)


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


class Simulation:
    """The loop of train_async.py with requests in flight, one action at a time, in an order that a test draws."""

    def __init__(self, *, bound: int, interval: int, ahead: int, end: int, partial: bool) -> None:
        self.schedule, self.bound, self.ahead = SyncSchedule(0, end, interval), bound, ahead
        self.worker, self.source = make(
            concurrency=3,
            max_weight_staleness=bound,
            n_samples_per_prompt=1,
            max_group_retries=1,
            partial_rollout=partial,
        )
        follow(end=end, interval=interval)
        self.published, self.trained = 1, 0
        self.begun: list[asyncio.Task[Any]] = []
        self.queue: asyncio.Task[Any] | None = None
        self.used: list[int | None] = []

    async def begin(self) -> bool:
        """Begin the next rollout, as RolloutsAhead does: the manager does them one after the other."""
        following = self.trained + len(self.begun)
        allowed = self.schedule.version_at(following) - self.published <= self.bound
        if following >= self.schedule.end or len(self.begun) > self.ahead or not (allowed or not self.begun):
            return False
        before = self.begun[-1] if self.begun else None

        async def in_turn() -> Any:
            if before is not None:
                await asyncio.wait([before])
            return await fully_async_rollout.collect(self.worker, following)

        self.begun.append(asyncio.create_task(in_turn()))
        return True

    async def train(self) -> bool:
        if not self.begun or not self.begun[0].done():
            return False
        at, output = self.schedule.version_at(self.trained), self.begun.pop(0).result()
        assert at == self.published, "the schedule foretells the version"
        for sample in (sample for group in output.samples for sample in group):
            births = [engine.birth[token] for token in sample.tokens[1:]]
            assert min(births) >= at - self.bound, "a trained token is too old"
            assert oldest_version(sample) <= min(births), "the dump shows it younger than it is"
            self.used.append(sample.group_index)
        self.trained += 1
        if self.trained % self.schedule.interval == 0:
            engine.version += 1  # engines go on before the driver tells the manager
            await settle()
            self.published += 1
            WeightClock().publish(self.published)
        return True

    async def finish(self) -> None:
        for _ in range(10_000):
            if self.trained == self.schedule.end:
                break
            engine.end_all()
            await settle()
            await self.train()
            await self.begin()
            await settle()
        assert self.trained == self.schedule.end, "the run hangs"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_trained_token_is_older_than_the_bound_whatever_ends_when(data):
    forget()
    number = st.integers

    async def run() -> None:
        simulation = Simulation(
            bound=data.draw(number(0, 2), "bound"),
            interval=data.draw(number(1, 2), "interval"),
            ahead=data.draw(number(1, 3), "ahead"),
            end=data.draw(number(1, 8), "end"),
            partial=data.draw(st.booleans(), "partial"),
        )
        first = data.draw(number(0, 2), "calls that hang until the end")
        for _ in range(data.draw(number(0, 40), "actions")):
            action = data.draw(st.sampled_from(["end", "end", "end", "abort", "crash", "go on", "go on"]))
            if action == "go on":
                await simulation.train()
                await simulation.begin()
            elif len(engine.calls) > first:
                how = "stop" if action == "end" else action
                engine.end(data.draw(number(first, len(engine.calls) - 1)), how)
            await settle()
        await simulation.finish()
        assert len(set(simulation.used)) == len(simulation.used), "a prompt was trained on twice"
        await simulation.worker.end()

    scenario(run())


# ---- in order (--deterministic)


async def in_order(rng: random.Random, source: Source, *, first: int, end: int, bound: int) -> dict[int, list[Any]]:
    """The driver's loop; when each call ends, crashes or is aborted, `rng` draws. Every second rollout is saved.

    Returns:
        rollout -> (prompt, how many rollouts the weights had seen that wrote its tokens) of each group.
    """
    global engine
    engine = Engine()
    WeightClock.clear_instances()
    schedule = SyncSchedule(first, end, stops_every=(2,))
    WeightClock().follow(schedule)
    WeightClock().publish(1)
    worker = AsyncRolloutWorker(source.args, source, concurrency=rng.randint(2, 5))

    async def some_end() -> None:
        for _ in range(rng.randint(0, len(engine.calls))):
            engine.end(rng.randrange(len(engine.calls)), rng.choice(["stop"] * 8 + ["crash", "abort"]))
        await settle()

    async def until(task: asyncio.Task[Any]) -> Any:
        await settle()
        while not task.done():
            await some_end()
        return task.result()

    trained = {}
    for rollout_id in range(first, end):
        output = await until(asyncio.create_task(fully_async_rollout.collect(worker, rollout_id)))
        births = [[engine.birth[token] for sample in group for token in sample.tokens[1:]] for group in output.samples]
        trained[rollout_id] = [
            (number, {first + birth - 1 for birth in of_group})
            for number, of_group in zip(numbers(output.samples), births, strict=True)
        ]
        if (rollout_id + 1) % 2 == 0:
            assert worker.outstanding() == [], "nothing is in flight behind a rollout that is saved"
        await some_end()  # meanwhile it is trained
        await until(asyncio.create_task(worker.settle()))
        sync()
    await worker.end()
    return trained


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_in_order_each_rollout_has_the_same_groups_of_the_same_weights_whatever_ends_when(bound):
    flags = {"max_group_retries": 100, "max_weight_staleness": bound, "deterministic": True}

    def run(seed: int, first: int = 0, drawn: int = 0) -> dict[int, list[Any]]:
        source = make(n_samples_per_prompt=1, **flags)[1]
        source.drawn = drawn
        return scenario(in_order(random.Random(seed), source, first=first, end=8, bound=bound))

    expected = run(0)
    # Two groups a rollout, in the order of the prompts; each of one version, at most `bound` older than the trainer,
    # and none older than the last rollout that was saved: 1, 3, 5.
    assert expected == {r: [(2 * r + i, {max(0, r - bound, r // 2 * 2)}) for i in range(2)] for r in range(8)}
    for seed in range(1, 12):
        assert run(seed) == expected
    for stopped_behind in (1, 3, 5):
        resumed = run(stopped_behind, first=stopped_behind + 1, drawn=2 * (stopped_behind + 1))
        assert resumed == {number: groups for number, groups in expected.items() if number > stopped_behind}


def test_in_order_a_group_that_never_works_is_replaced_behind_the_others_of_its_weights():
    async def run() -> None:
        follow()
        worker, _ = make(concurrency=4, n_samples_per_prompt=1, max_group_retries=0, deterministic=True, **BOUND)
        task = await collecting(worker, 0)
        assert [sample.group_index for sample, _ in engine.calls] == [0, 1]
        engine.end(0, "crash")
        await settle()
        assert [sample.group_index for sample, _ in engine.calls] == [1, 2]
        engine.end(1)
        await settle()
        assert not task.done(), "group 2 has to wait for group 1"
        engine.end(0)
        assert numbers((await task).samples) == [1, 2]
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
