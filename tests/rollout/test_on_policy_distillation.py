"""The distillation reward asks a teacher for log-probs of exactly the response tokens and puts them on the sample."""

from __future__ import annotations

from typing import Any

import pytest

from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.rollout.rm_hub import RewardError
from slime.rollout.train_data import samples_to_train_data
from slime.utils.types import Sample
from tests.rollout.reward_fakes import FakeService, run
from tests.unit.rollout_fakes import rollout_args


def teacher(request: dict[str, Any]) -> dict[str, Any]:
    """As SGLang answers: one entry per token from logprob_start_len on, the first without a log-prob."""
    ids, start_len = request["input_ids"], request["logprob_start_len"]
    pairs = [[-token / 10, token, None] for token in ids[start_len:]]
    return {"text": "", "meta_info": {"input_token_logprobs": [[None, *pairs[0][1:]], *pairs[1:]]}}


def sample(**fields: Any) -> Sample:
    return Sample(**{"index": 4, "tokens": [5, 6, 7, 8, 9], "response_length": 2, **fields})


def score(fake: FakeService, scored: Sample, **flags: Any) -> float:
    return run(reward_func(rollout_args(rm_url=fake.url + "/generate", **flags), scored))


def test_the_teachers_log_probs_of_the_response_are_on_the_sample(start_service) -> None:
    fake, scored = start_service(teacher), sample()
    assert score(fake, scored) == 0.0
    assert scored.teacher_log_probs == [-0.8, -0.9]
    (request,) = fake.requests
    assert (request["input_ids"], request["return_logprob"]) == ([5, 6, 7, 8, 9], True)
    assert request["logprob_start_len"] == 2 and request["sampling_params"]["max_new_tokens"] == 0
    assert fake.paths == ["/generate"]


def test_without_an_address_the_model_named_teacher_is_asked_and_never_the_policy(start_service) -> None:
    fake, scored = start_service(teacher), sample()
    args = rollout_args(sglang_model_routers={"teacher": ("127.0.0.1", fake.port)})
    assert run(reward_func(args, scored)) == 0.0
    assert (fake.paths, scored.teacher_log_probs) == (["/generate"], [-0.8, -0.9])
    with pytest.raises(ValueError, match="no model 'teacher' runs .*give --rm-url"):
        run(reward_func(rollout_args(), sample()))


def test_rewards_are_zero_and_the_log_probs_reach_the_training_data(start_service) -> None:
    fake, scored, empty = start_service(teacher), sample(), sample(tokens=[5], response_length=0)
    assert [score(fake, scored), score(fake, empty)] == [0.0, 0.0]
    assert len(fake.requests) == 1, "nothing to ask for an empty response"
    raw, rewards = post_process_rewards(rollout_args(), [scored, empty])
    assert (raw, rewards) == ([0.0, 0.0], [0.0, 0.0])
    assert samples_to_train_data([scored, empty], raw, rewards)["teacher_log_probs"] == [[-0.8, -0.9], []]


def test_a_sample_that_no_teacher_saw_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample 4 has no teacher_log_probs for 2 response tokens; --custom-rm-path"):
        post_process_rewards(rollout_args(), [sample()])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": "x"}, "unexpected answer for sample 4: {'error': 'x'}"),
        ({"meta_info": {"input_token_logprobs": [[-1.0, 9, None]]}}, "unexpected answer for sample 4"),
        ({"meta_info": {"input_token_logprobs": [[-1.0, 3, None], [-1.0, 9, None]]}}, "log-probs of other tokens"),
        ({"meta_info": {"input_token_logprobs": [[None, 8, None], [-1.0, 9, None]]}}, "no log-prob for a response"),
    ],
)
def test_an_answer_about_something_else_is_a_reward_error(start_service, answer: Any, message: str) -> None:
    fake = start_service(lambda request: answer)
    with pytest.raises(RewardError, match=message):
        score(fake, sample())
