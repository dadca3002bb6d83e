"""Engines and reward services whose answers go wrong on the way: no sample is lost, doubled or wrong, or a sentence
names the address.

The rollout, its HTTP client and its retries are the real ones; a proxy (`faulty_proxy`) spoils every third answer, or
all. Prompt "p" + letter n of the alphabet is answered with n tokens 100, 101, ..., and the reward is their number, so
every token and reward of every sample is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils, http_utils
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.chaos.faulty_proxy import FAULTS, FaultyProxy
from tests.unit.rollout_fakes import FakeEngine, rollout_args

LETTERS = "bcdefghijklm"  # twelve prompts: two rollouts of six groups
GROUPS, SAMPLES = 6, 2
GENERATE, SCORE = "/generate", "/score"
RETRIED_BY_GROUP = {"another_json"}
"""Faults that the HTTP client cannot see: only --on-sample-error retry asks again."""


class World:
    """A rollout over a scripted engine and a scripted reward service, either behind a proxy."""

    def __init__(self, engine: FakeEngine, scores: Any, prompts: Path) -> None:
        self.engine, self.scores, self.prompts = engine, scores, prompts

    def run(self, proxy: FaultyProxy, **changes: Any) -> list[Sample]:
        """The samples of two rollouts."""
        is_reward = proxy.path == SCORE
        GenerateState.clear_instances()
        args = rollout_args(
            prompt_data=str(self.prompts), rollout_batch_size=GROUPS, over_sampling_batch_size=GROUPS,
            n_samples_per_prompt=SAMPLES, custom_rm_path=None, rm_type="remote_rm",
            sglang_router_port=self.engine.port if is_reward else proxy.port,
            rm_url=(proxy.url if is_reward else self.scores.url) + SCORE, **changes,
        )  # fmt: skip
        source = RolloutDataSourceWithBuffer(args)
        outputs = [generate_rollout(args, rollout_id, source) for rollout_id in range(2)]
        return [sample for output in outputs for group in output.samples for sample in group]


@pytest.fixture
def world(letters: None, start_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(http_utils.CLIENT, "limits", http_utils.HttpLimits(retry_window_s=2.0, max_backoff_s=0.05))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"p{letter}"}) + "\n" for letter in LETTERS))
    scores = start_service(lambda request: len(request["response"]))
    with FakeEngine().serve() as engine:
        yield World(engine, scores, prompts)
        async_utils.run(http_utils.close_http_client())
        async_utils.run(close_http_client())


def behind(world: World, fault: str, path: str, *, every: int) -> FaultyProxy:
    return FaultyProxy(world.scores.url if path == SCORE else world.engine.url, fault, path, every)


def check_samples(samples: list[Sample]) -> None:
    """Each of the 24 samples is there once, with the tokens and the reward of its own prompt."""
    assert sorted(sample.index for sample in samples if sample.index is not None) == list(range(12 * SAMPLES))
    for sample in samples:
        assert isinstance(sample.prompt, str)
        count = ord(sample.prompt[-1]) - ord("a")
        assert sample.group_index == LETTERS.index(sample.prompt[-1])
        assert sample.tokens == [*map(ord, sample.prompt), *range(100, 100 + count)]
        assert sample.rollout_log_probs == [-0.5 - i for i in range(count)]
        assert (sample.response_length, sample.response, sample.reward) == (count, "x" * count, float(count))
        assert sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize("path", [GENERATE, SCORE])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_now_and_then_costs_no_sample(world: World, fault: str, path: str) -> None:
    # A group is generated again as a whole: two requests of which each third one fails pass by the second try.
    changes = {"on_sample_error": "retry", "max_group_retries": 10} if fault in RETRIED_BY_GROUP else {}
    with behind(world, fault, path, every=3).serve() as proxy:
        check_samples(world.run(proxy, **changes))
    assert proxy.spoiled >= 8, "24 requests, and those that were sent again"


@pytest.mark.parametrize("path", [GENERATE, SCORE])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "slow"])
def test_a_fault_that_lasts_ends_the_rollout_and_names_the_address(world: World, fault: str, path: str) -> None:
    http_utils.CLIENT.limits.retry_window_s = 0.3
    changes = {"on_untrusted_reward": "keep"} if path == SCORE else {}  # else the sample is masked, and counted
    with behind(world, fault, path, every=1).serve() as proxy, pytest.raises(SampleError) as caught:
        world.run(proxy, **changes)
    assert f"{proxy.url}{path}" in str(caught.value)
    assert "(prompt " in str(caught.value), "and which sample it was"


def test_an_engine_that_is_too_slow_is_named_at_the_deadline(world: World) -> None:
    http_utils.CLIENT.limits.request_timeout_s = 0.1
    with behind(world, "slow", GENERATE, every=3).serve() as proxy, pytest.raises(SampleError) as caught:
        world.run(proxy, sglang_router_request_timeout_secs=0.1)
    assert f"POST {proxy.url}/generate was not answered within 0.1 s" in str(caught.value)
    GenerateState.clear_instances()


def test_a_slow_engine_costs_no_sample_where_groups_are_tried_again(world: World) -> None:
    with behind(world, "slow", GENERATE, every=3).serve() as proxy:
        samples = world.run(
            proxy, sglang_router_request_timeout_secs=0.1, on_sample_error="retry", max_group_retries=20
        )
    check_samples(samples)
