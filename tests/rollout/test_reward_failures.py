"""A reward service that fails for one prompt costs that prompt, is counted, and leaves the run alive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling import generation
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils import async_utils
from slime.utils.http_utils import close_http_client
from tests.rollout.reward_fakes import FakeService
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args


@pytest.fixture
def make(monkeypatch, tmp_path, start_service):
    """(args, data source, reward service): prompts pb, pc, pd; the service has no score for those in `hopeless`."""
    GenerateState.clear_instances()
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"p{letter}"}) + "\n" for letter in "bcd"))
    with FakeEngine().serve() as engine:

        def build(hopeless: str, **changes: Any):
            rewards: FakeService = start_service(
                lambda request: "not yet" if request["prompt"] in hopeless.split() else len(request["response"])
            )
            scored = {"custom_rm_path": None, "rm_type": "remote_rm", "rm_url": rewards.url}
            args = rollout_args(prompt_data=str(path), sglang_router_port=engine.port, **{**scored, **changes})
            return args, RolloutDataSourceWithBuffer(args), rewards

        yield build
    async_utils.run(close_http_client())
    GenerateState.clear_instances()


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_dropped_prompt_is_replaced_and_its_lost_rewards_are_counted(make, group_rm: bool) -> None:
    args, source, rewards = make("pc", on_untrusted_reward="drop", group_rm=group_rm)
    output = generate_rollout(args, 0, source)
    assert [group[0].prompt for group in output.samples] == ["pb", "pd"]
    assert [[sample.reward for sample in group] for group in output.samples] == [[1.0, 1.0], [3.0, 3.0]]
    assert output.metrics["rollout/reward_failures"] == 2, "one for each sample"
    assert output.metrics["rollout/dynamic_filter/drop_untrusted_reward"] == 1
    asked = [request["prompt"] for request in rewards.requests]
    assert asked.count("pc") == 2 * 10, "every try was made"


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_service_that_fails_costs_the_sample_its_reward_and_not_the_run(make, group_rm: bool) -> None:
    args, source, _ = make("pc", group_rm=group_rm)
    served, lost = generate_rollout(args, 0, source).samples
    assert [(s.reward, s.end_reason, s.reward_is_trusted) for s in served] == [(1.0, "done", True)] * 2
    assert [(s.reward, s.end_reason, s.reward_is_trusted) for s in lost] == [(None, "grader_error", False)] * 2


def test_a_run_that_shall_fail_names_service_sample_prompt_and_last_answer(make) -> None:
    args, source, rewards = make("pc", on_untrusted_reward="keep", n_samples_per_prompt=1)
    with pytest.raises(SampleError) as caught:
        generate_rollout(args, 0, source)
    for part in ("the reward remote_rm", "sample 1", "'pc'", rewards.url, "failed 10 times", "not yet"):
        assert part in str(caught.value)


def test_a_refused_reward_is_not_generated_again(make) -> None:
    args, source, rewards = make("", on_sample_error="retry", rollout_batch_size=1, over_sampling_batch_size=1)
    rewards.statuses = [422]
    output = generate_rollout(args, 0, source)
    assert output.metrics["rollout/reward_failures"] == 1
    assert output.metrics["rollout/sample_errors/dropped_groups"] == 1
    assert "rollout/sample_errors/retried_groups" not in output.metrics


def test_a_failed_reward_is_generated_again_when_retrying(make) -> None:
    args, source, rewards = make("", on_untrusted_reward="retry", rollout_batch_size=1, over_sampling_batch_size=1)
    args.n_samples_per_prompt = 1
    rewards.statuses = [500] * 10
    output = generate_rollout(args, 0, source)
    assert [group[0].prompt for group in output.samples] == ["pb"]
    assert output.metrics["rollout/reward_failures"] == 1
    assert output.metrics["rollout/untrusted_retries"] == 1
    assert [(s.reward, s.reward_is_trusted) for s in output.samples[0]] == [(1.0, True)]


def test_a_rollout_without_failures_logs_none(make) -> None:
    args, source, _ = make("")
    assert "rollout/reward_failures" not in generate_rollout(args, 0, source).metrics
