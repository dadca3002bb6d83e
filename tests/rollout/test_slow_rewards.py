"""A rollout that ends waits for no reward: with --partial-rollout finished responses go back, to be scored later.

The rewards below hang at their first call for "pz", as a reward service without an answer does; a later call answers.
"""

from __future__ import annotations

import asyncio
import copy

import pytest
from aiohttp import web

from slime.rollout import sglang_rollout
from slime.rollout.rm_hub import take_reward_failures
from slime.rollout.sampling.generation import GenerateState, generate
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils
from slime.utils.http_utils import close_http_client
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.unit.rollout_fakes import serve

Status = Sample.Status
FOUR = {"over_sampling_batch_size": 3, "n_samples_per_prompt": 2, "rollout_max_response_len": 30}
PARTIAL = {**FOUR, "partial_rollout": True}


class Calls:
    """Calls of the rewards for "pz"; those whose number is in `hang` never end by themselves.

    Other prompts are scored once all of these have begun: the rollout then ends while they hang.
    """

    hang = {0, 1}
    begun = cancelled = 0


async def maybe_hang(prompt):
    while prompt != "pz" and Calls.begun <= max(Calls.hang, default=-1):
        await asyncio.sleep(0.001)
    if prompt != "pz":
        return
    number, Calls.begun = Calls.begun, Calls.begun + 1
    if number in Calls.hang:
        try:
            await asyncio.Event().wait()
        finally:
            Calls.cancelled += 1


async def slow_reward(args, sample, **kwargs):
    await maybe_hang(sample.prompt)
    return float(sample.response_length)


async def slow_group_reward(args, samples, **kwargs):
    await maybe_hang(samples[0].prompt)
    return [float(sample.response_length) for sample in samples]


async def marks_greedy(args, sample, sampling_params):
    sample.metadata["greedy"] = sampling_params["temperature"] == 0
    return await generate(args, sample, sampling_params)


async def slow_on_greedy(args, sample, **kwargs):
    return await slow_reward(args, sample) if sample.metadata["greedy"] else 1.0


def count_hook(args, sample):
    sample.metadata["hooks"] = sample.metadata.get("hooks", 0) + 1


async def in_two(args, sample, sampling_params):
    first = await generate(args, sample, sampling_params)
    return [first, copy.deepcopy(first)]


def drop_nothing(args, group):
    assert all(sample.reward is not None for sample in group), "a filter sees scored groups only"
    return True


@pytest.fixture
def calls(monkeypatch):
    """The counters of the rewards; the minute after which a rollout cancels what is left never comes."""
    counters = load_function(f"{__file__}:Calls")  # a file that is named as a hook is a module of its own
    counters.hang, counters.begun, counters.cancelled = {0, 1}, 0, 0
    monkeypatch.setattr(sglang_rollout, "ABORT_DEADLINE_S", 5.0)
    yield counters
    WeightClock.clear_instances()


def of_z(engine):
    return [request for request in engine.requests if request["input_ids"][1] == ord("z")]


def resume(args, source, engine):
    """The next rollout, which takes what is in the buffer and one more prompt."""
    engine.requests, args.over_sampling_batch_size = [], 2
    output = generate_rollout(args, 1, source)
    return {group[0].prompt: group for group in output.samples}["pz"], output


@pytest.mark.parametrize("reward", ["slow_reward", "slow_group_reward"])
def test_a_finished_response_is_kept_and_only_scored_in_the_next_rollout(make, engine, calls, reward):
    is_group = reward == "slow_group_reward"
    calls.hang = {0} if is_group else {0, 1}
    args, source = make(
        "bcz",
        **PARTIAL,
        custom_rm_path=f"{__file__}:{reward}",
        group_rm=is_group,
        rollout_sample_hook_path=[f"{__file__}:count_hook"],
        dynamic_sampling_filter_path=f"{__file__}:drop_nothing",
    )
    output = generate_rollout(args, 0, source)
    assert {group[0].prompt for group in output.samples} == {"pb", "pc"}
    assert calls.cancelled == calls.begun == (1 if is_group else 2), "the reward hears that nobody waits any more"
    (kept,) = copy.deepcopy(source.buffer)
    assert [(s.status, s.response_length, s.reward) for s in kept] == [(Status.COMPLETED, 25, None)] * 2
    group, output = resume(args, source, engine)
    assert of_z(engine) == [], "nothing of it is generated again"
    assert [s.tokens for s in group] == [s.tokens for s in kept]
    assert [(s.reward, s.metadata) for s in group] == [(25.0, {"hooks": 1, "start_rollout_id": 0})] * 2
    assert output.metrics["rollout/partial_rollout/resumed_samples"] == 2.0


def test_of_a_group_only_the_samples_without_a_reward_are_scored_again(make, engine, calls):
    calls.hang = {1}
    args, source = make("bcz", **PARTIAL, custom_rm_path=f"{__file__}:slow_reward")
    generate_rollout(args, 0, source)
    (kept,) = source.buffer
    assert sorted(s.reward is None for s in kept) == [False, True]
    group, _ = resume(args, source, engine)
    assert [s.reward for s in group] == [25.0, 25.0]
    assert calls.begun == 2 + 1 and of_z(engine) == []


def test_a_response_that_ends_with_the_rollout_is_not_scored_any_more(make, engine, calls):
    """The engine holds "pz" until it is told to abort, and has finished the answer by then."""
    args, source = make("bcz", **{**PARTIAL, "rollout_max_response_len": 4}, custom_rm_path=f"{__file__}:slow_reward")
    engine.held, engine.partial = {ord("z")}, 25
    calls.hang = set()
    generate_rollout(args, 0, source)
    (kept,) = source.buffer
    assert [(s.status, s.response_length, s.reward) for s in kept] == [(Status.TRUNCATED, 4, None)] * 2
    assert calls.begun == 0


def test_without_partial_rollout_the_prompt_goes_back_at_once(make, engine, calls, caplog):
    args, source = make("bcz", **FOUR, custom_rm_path=f"{__file__}:slow_reward")
    generate_rollout(args, 0, source)
    assert calls.cancelled == 2 and "ignored the abort" not in caplog.text
    (kept,) = source.buffer
    assert [(s.status, s.tokens, s.reward) for s in kept] == [(Status.PENDING, [], None)] * 2
    group, _ = resume(args, source, engine)
    assert len(of_z(engine)) == 2 and [s.reward for s in group] == [25.0, 25.0]


def test_an_unscored_response_survives_a_checkpoint(make, engine, calls):
    args, source = make("bcz", **PARTIAL, custom_rm_path=f"{__file__}:slow_reward")
    generate_rollout(args, 0, source)
    source.save(0)
    resumed = type(source)(args)
    resumed.load(0)
    assert resumed.buffer == source.buffer
    group, _ = resume(args, resumed, engine)
    assert of_z(engine) == [] and [s.reward for s in group] == [25.0, 25.0]


@pytest.mark.parametrize(("bound", "num_requests"), [(0, 2), (1, 0)])
def test_an_unscored_response_that_became_too_old_begins_anew(make, engine, calls, bound, num_requests):
    args, source = make("bcz", **PARTIAL, custom_rm_path=f"{__file__}:slow_reward", max_weight_staleness=bound)
    # The fake's answers are of version 7; rollout 0 is trained at 7, rollout 1 at 8.
    WeightClock().follow(SyncSchedule(first=0, end=9, version=7))
    WeightClock().publish(7)
    generate_rollout(args, 0, source)
    group, _ = resume(args, source, engine)
    assert len(of_z(engine)) == num_requests and [s.reward for s in group] == [25.0, 25.0]


def test_a_fan_out_begins_anew(make, engine, calls):
    path = f"{__file__}:in_two"  # the two calls that hang are for a list of two each
    args, source = make(
        "bcz", **PARTIAL, custom_rm_path=f"{__file__}:slow_group_reward", custom_generate_function_path=path
    )
    generate_rollout(args, 0, source)
    (kept,) = source.buffer
    assert [(s.index, s.tokens) for s in kept] == [(4, []), (5, [])]


def test_a_greedy_baseline_without_a_reward_is_made_again(make, engine, calls):
    calls.hang = {0}
    changes = {
        "custom_rm_path": f"{__file__}:slow_on_greedy",
        "custom_generate_function_path": f"{__file__}:marks_greedy",
    }
    args, source = make("bcz", **PARTIAL, **changes, advantage_estimator="remax")
    generate_rollout(args, 0, source)
    group, output = resume(args, source, engine)
    assert len(of_z(engine)) == 1, "the baseline alone is generated"
    assert [s.metadata["greedy_reward"] for s in group] == [25.0, 25.0]
    assert output.metrics["rollout/greedy_reward"] > 0


def test_a_request_to_a_reward_service_is_given_up_and_is_no_failure(make, engine, calls):
    """A service of ten lines that answers "pz" only when the connection is closed, which it notes."""
    asked, closed, is_slow = [], [], [True]

    async def score(request):
        body = await request.json()
        while is_slow[0] and body["prompt"] != "pz" and len(asked) < 2:
            await asyncio.sleep(0.001)
        if is_slow[0] and body["prompt"] == "pz":
            asked.append(body["prompt"])
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                closed.append(body["prompt"])
                raise
        return web.json_response(1.0)

    app = web.Application()
    app.router.add_post("/", score)
    take_reward_failures()
    with serve(app, handler_cancellation=True) as port:
        url = f"http://127.0.0.1:{port}/"
        args, source = make("bcz", **PARTIAL, custom_rm_path=None, rm_type="remote_rm", rm_url=url)
        output = generate_rollout(args, 0, source)
        is_slow[0] = False
        group, _ = resume(args, source, engine)
        async_utils.run(close_http_client())
    assert closed == ["pz", "pz"] and "rollout/reward_failures" not in output.metrics
    assert of_z(engine) == [] and [s.reward for s in group] == [1.0, 1.0]


def test_a_cancelled_group_takes_its_scoring_along(make, calls):
    """As at a rollout that fails: the group's task is cancelled, not only its scoring."""
    args, source = make("z", **PARTIAL, custom_rm_path=f"{__file__}:slow_reward")

    async def cancelled():
        state = GenerateState(args)
        state.submit_generate_tasks(source.get_samples(1))
        while calls.begun < 2:
            await asyncio.sleep(0.005)
        (task,) = state.pendings
        await async_utils.cancel_all([task])
        return task.cancelled(), state.scorings

    assert async_utils.run(cancelled()) == (True, set())
    assert calls.cancelled == 2
