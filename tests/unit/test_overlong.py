"""The penalty for responses near the length limit: its formula, where it is added, and what is logged of it."""

from __future__ import annotations

import pytest

from slime.algorithms.estimators import overlong_penalty
from slime.observability.rollout_metrics import compute_rollout_metrics
from slime.rollout.train_data import post_process_rewards
from slime.utils.types import Sample
from tests.unit.test_rollout_metrics import changed
from tests.unit.test_rollout_train_data import flags, sample


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (12, 0.0), (13, -1 / 8), (16, -4 / 8), (20, -1.0), (21, -1.0), (500, -1.0)],
)
def test_the_penalty_grows_over_the_buffer_and_not_beyond(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_length=20, buffer_length=8, factor=1.0) == expected
    assert overlong_penalty(length, max_length=20, buffer_length=8, factor=0.5) == expected / 2


def test_a_buffer_as_long_as_the_limit_punishes_every_token() -> None:
    assert overlong_penalty(5, max_length=20, buffer_length=20, factor=1.0) == -5 / 20
    assert overlong_penalty(0, max_length=20, buffer_length=20, factor=1.0) == 0.0


def test_it_is_added_before_the_normalisation_and_raw_rewards_stay() -> None:
    samples = [sample(0, 1.0, response=range(4)), sample(0, 1.0, response=range(10))]
    args = flags(overlong_buffer_len=8, rollout_max_response_len=10, overlong_penalty_factor=2.0)
    args.grpo_std_normalization = False
    raw, rewards = post_process_rewards(args, samples)
    shaped = [1.0 - 2.0 * 2 / 8, 1.0 - 2.0]
    mean = sum(shaped) / 2
    assert raw == [1.0, 1.0]
    assert rewards == [shaped[0] - mean, shaped[1] - mean]
    args.rewards_normalization = False
    assert post_process_rewards(args, samples) == ([1.0, 1.0], shaped)
    args.overlong_buffer_len = None
    assert post_process_rewards(args, samples) == ([1.0, 1.0], [1.0, 1.0])


def test_mean_and_share_are_logged_only_when_asked_for() -> None:
    samples = [Sample(reward=1.0, response_length=length) for length in (2, 6, 8, 8)]
    asked = changed(overlong_buffer_len=4, overlong_penalty_factor=1.0, rollout_max_response_len=8, log_passrate=False)
    metrics = compute_rollout_metrics(asked, samples, 1.0)
    assert metrics["rollout/overlong_penalty"] == (0 - 2 / 4 - 1 - 1) / 4
    assert metrics["rollout/overlong_ratio"] == 3 / 4
    assert not any("overlong" in name for name in compute_rollout_metrics(changed(log_passrate=False), samples, 1.0))
