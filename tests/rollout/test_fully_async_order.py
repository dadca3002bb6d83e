"""Whatever ends when in the fully async rollout: no trained token is too old, and in order all is the same."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout import fully_async_rollout
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.sampling.weight_versions import (
    SyncSchedule,
    WeightClock,
    oldest_version,
)
from tests.rollout.async_world import (  # noqa: F401 - fresh is used by all
    BOUND,
    Engine,
    Source,
    collecting,
    engine,
    follow,
    forget,
    fresh,
    make,
    numbers,
    scenario,
    settle,
    sync,
)


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
    engine.reset()
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
