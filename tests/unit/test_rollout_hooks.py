"""Hook protocols, dynamic filters and legacy return types."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from slime.rollout.base_types import (
    HOOKS,
    DataSourceClass,
    DynamicFilter,
    GenerateFn,
    ProcessReward,
    RewardFn,
    RolloutFn,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    SampleHook,
    call_rollout_fn,
)
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.hooks.signatures import call_of, signature_problem
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sglang_rollout import generate, generate_rollout
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.unit.rollout_fakes import reward_response_length, rollout_args


@pytest.mark.parametrize(
    ("fn", "protocol"),
    [(generate_rollout, RolloutFn), (generate, GenerateFn), (check_reward_nonzero_std, DynamicFilter)]
    + [(reward_response_length, RewardFn), (lambda *a, **k: None, RolloutFn)],
)
def test_functions_that_can_be_called_pass(fn, protocol):
    assert signature_problem(fn, protocol) is None


@pytest.mark.parametrize(
    ("fn", "protocol", "message"),
    [
        (lambda args, rollout_id, data_source: None, RolloutFn, "unexpected keyword argument 'evaluation'"),
        (lambda args: None, DynamicFilter, r"called as \(args, group\)"),
        (lambda args, sample, params, more: None, GenerateFn, "missing a required argument: 'more'"),
        ("text", GenerateFn, "a str, not a function"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_described(fn, protocol, message):
    import re

    assert re.search(message, signature_problem(fn, protocol) or "")


async def is_awaited(args, sample, sampling_params):
    return sample


def is_plain(args, sample, sampling_params):
    return sample


class Agent:
    """Objects that can be called, and their methods."""

    async def __call__(self, args, sample, sampling_params):
        return sample

    async def run(self, args, sample, sampling_params):
        return sample

    def begin(self, args, sample, sampling_params):
        return self.run(args, sample, sampling_params)

    def answer(self, args, sample, sampling_params):
        return sample.response


class PlainAgent:
    def __call__(self, args, sample, sampling_params):
        return sample


def decorated(fn):
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def in_a_thread(args, sample, sampling_params):
    return asyncio.get_running_loop().run_in_executor(None, is_plain, args, sample, sampling_params)


def with_one_inside(args, sample, sampling_params):
    async def inside():
        return sample

    return inside()


async def yields(args, sample, sampling_params):
    yield sample


AWAITED = [
    is_awaited,
    Agent(),
    Agent().run,
    Agent().begin,
    functools.partial(is_awaited),
    functools.partial(functools.partial(Agent())),
    decorated(is_awaited),
    decorated(decorated(is_awaited)),
    functools.wraps(is_awaited)(decorated(is_awaited)),
    lambda args, sample, params: is_awaited(args, sample, params),
    in_a_thread,
    with_one_inside,
]
NOT_ASYNC = [
    is_plain,
    PlainAgent(),
    Agent().answer,
    functools.partial(is_plain),
    decorated(is_plain),
    lambda args, sample, params: sample,
    yields,
]


@pytest.mark.parametrize("fn", AWAITED)
def test_a_generate_function_that_can_be_awaited_fits(fn):
    assert signature_problem(fn, GenerateFn) is None


@pytest.mark.parametrize("fn", NOT_ASYNC)
def test_a_generate_function_that_is_not_async_does_not_fit(fn):
    problem = signature_problem(fn, GenerateFn)
    assert problem == "it is not async, but what it returns is awaited; write it as `async def`"


async def two(args, group):
    return True


@functools.wraps(two)
def made_plain(args, group):
    return asyncio.run(two(args, group))


@pytest.mark.parametrize(
    ("fn", "protocol", "fits"),
    [
        (two, DynamicFilter, False),
        (functools.partial(two), DynamicFilter, False),
        (made_plain, DynamicFilter, True),
        (two, RewardFn, True),
        (lambda args, sample, **kwargs: 1.0, RewardFn, True),
        (two, SampleHook, True),
        (lambda args, sample: None, SampleHook, True),
    ],
)
def test_a_function_whose_result_is_not_awaited_must_be_plain(fn, protocol, fits):
    problem = signature_problem(fn, protocol)
    assert problem == (None if fits else "it is async, but what it returns is not awaited; write it as `def`")


def test_a_method_of_a_data_source_must_be_plain():
    class Source(RolloutDataSourceWithBuffer):
        async def get_samples(self, num_samples):
            return []

    assert "Source.get_samples is async" in (signature_problem(Source, DataSourceClass) or "")


@pytest.mark.parametrize("protocol", HOOKS.values())
def test_every_hook_but_rewards_and_sample_hooks_says_whether_it_is_awaited(protocol):
    names, keywords = call_of(protocol)
    scope: dict[str, Any] = {}
    parameters = ", ".join([*names, *(["*", *keywords] if keywords else [])])
    exec(f"async def fn({parameters}): pass", scope)
    either = protocol in (GenerateFn, SampleHook, RewardFn, ProcessReward)
    assert (signature_problem(scope["fn"], protocol) is None) == either


def test_every_hook_protocol_is_documented_with_its_flag():
    for attribute, protocol in HOOKS.items():
        flag = "--" + attribute.replace("_", "-")
        assert flag in protocol.__doc__, f"{protocol.__name__} does not name {flag}"


S = Sample


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        ([S(), S()], [1, 1]),
        ([[S(), S()], [S()]], [2, 1]),
        ([[[S(), S()], S()], [S()]], [3, 1]),
        (RolloutFnTrainOutput([[S(), [S(), S()]]], {"m": 1}), [3]),
    ],
)
def test_legacy_returns_become_groups(output, shape):
    result = call_rollout_fn(lambda evaluation: output, evaluation=False)
    assert [len(group) for group in result.samples] == shape
    assert all(isinstance(s, Sample) for group in result.samples for s in group)


def test_eval_returns_are_wrapped_and_others_refused():
    data = {"a": {"rewards": [1.0]}}
    assert call_rollout_fn(lambda evaluation: data, evaluation=True) == RolloutFnEvalOutput(data)
    with pytest.raises(TypeError, match="--eval-function-path .* returned a list; it must"):
        call_rollout_fn(lambda evaluation: [], evaluation=True)
    with pytest.raises(TypeError, match="--rollout-function-path .*<lambda> returned a int; it must"):
        call_rollout_fn(lambda evaluation: 3, evaluation=False)
    with pytest.raises(TypeError, match="expected a Sample"):
        call_rollout_fn(lambda evaluation: [["text"]], evaluation=False)


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([0, 1], True, None), ([1, 1, 1], False, "zero_std_1.0"), ([0.25, 0.25 + 1e-9], False, "zero_std_0.2")]
    + [([3], False, "zero_std_3.0")],
)
def test_groups_of_equal_rewards_are_dropped(rewards, keep, reason):
    group = [Sample(reward=reward) for reward in rewards]
    assert check_reward_nonzero_std(rollout_args(), group) == DynamicFilterOutput(keep, reason)
    assert check_reward_nonzero_std_with_fallback(rollout_args(), group).keep_when_insufficient


@pytest.mark.parametrize(
    ("output", "remaining", "drop"),
    [
        (DynamicFilterOutput(True), 1, False),
        (DynamicFilterOutput(False), 1, True),
        (DynamicFilterOutput(False, keep_when_insufficient=True), 5, True),
        (DynamicFilterOutput(False, keep_when_insufficient=True), 4, False),
    ],
)
def test_a_fallback_group_is_kept_only_when_too_few_would_remain(output, remaining, drop):
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4) is drop


def test_no_filter_keeps_and_a_bool_is_an_answer():
    assert call_dynamic_filter(None).keep
    assert not call_dynamic_filter(lambda a: False, 1).keep
    gatherer = MetricGatherer()
    gatherer.on_dynamic_filter_drop("x")
    gatherer.on_dynamic_filter_drop(None)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_x": 1, "rollout/dynamic_filter/drop_unnamed": 1}


def replace(args, sample):
    return Sample(prompt=sample.prompt + "!", tokens=[1])


def wrong(args, sample):
    return "text"


def test_sample_hooks_keep_the_shape_of_fan_out_lists():
    args = rollout_args(rollout_sample_hook_path=[f"{__file__}:replace"] * 2)
    value = run(apply_rollout_sample_hooks(args, [Sample(prompt="a"), [Sample(prompt="b")]]))
    assert (value[0].prompt, value[1][0].prompt) == ("a!!", "b!!")


def test_a_sample_hook_that_returns_something_else_is_refused():
    with pytest.raises(SampleError, match="wrong returned str for sample None .* must return a Sample or None"):
        run(apply_rollout_sample_hooks(rollout_args(rollout_sample_hook_path=[f"{__file__}:wrong"]), Sample()))
