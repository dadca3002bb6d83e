"""Metrics of rollouts and evaluations from hand-made samples."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.observability.metric_utils import compute_pass_rate, compute_statistics, has_repetition
from slime.observability.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from slime.utils.types import Sample

ARGS = Namespace(
    reward_key=None, log_passrate=True, rollout_num_gpus=2, n_samples_per_prompt=2, n_samples_per_eval_prompt=2
)


def sample(group: int, reward: float, length: int, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(
        group_index=group, reward=reward, response_length=length, loss_mask=[1] * (length - 1) + [0], status=status
    )


def test_rollout_metrics_have_the_contracts_names_and_values():
    samples = [sample(0, 1, 2), sample(0, 1, 4), sample(1, 0, 3), sample(1, 1, 7, Sample.Status.TRUNCATED)]
    metrics = compute_rollout_metrics(ARGS, samples, 2.0)
    effective = [1, 3, 2, 6]
    assert metrics["rollout/response_len/mean"] == sum(effective) / 4
    assert metrics["rollout/response_len/max"] == 6
    assert metrics["rollout/truncated_ratio"] == 1 / 4
    assert metrics["rollout/zero_std/count_1"] == 1 and "rollout/zero_std/count_0" not in metrics
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == (2 + 4 + 3 + 7) / 2.0 / 2
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == sum(effective) / 2.0 / 2
    assert metrics["passrate/pass@1"] == 3 / 4
    assert metrics["passrate/pass@2"] == 1.0


def test_eval_metrics_are_per_data_set():
    samples = [sample(0, 1, 2), sample(0, 0, 4)]
    metrics = compute_eval_metrics(ARGS, {"add": {"rewards": [1, 0], "truncated": [True, False], "samples": samples}})
    assert metrics["eval/add"] == 0.5
    assert metrics["eval/add-truncated_ratio"] == 0.5
    assert metrics["eval/add/response_len/mean"] == (1 + 3) / 2
    assert metrics["eval/add-pass@1"] == 0.5 and metrics["eval/add-pass@2"] == 1.0


def test_groups_of_another_size_have_no_pass_rate():
    samples = [sample(0, 1, 2), sample(0, 1, 2), sample(0, 1, 2)]
    assert not [name for name in compute_rollout_metrics(ARGS, samples, 1.0) if name.startswith("passrate/")]


def test_samples_without_a_reward_still_have_metrics():
    metrics = compute_rollout_metrics(ARGS, [Sample(response_length=3)], 1.0)
    assert metrics["rollout/response_len/mean"] == 3


def test_pass_at_k_is_the_chance_of_drawing_a_success_without_replacement():
    rates = compute_pass_rate([1, 0, 0, 0], 4)
    assert rates == pytest.approx({"pass@1": 1 / 4, "pass@2": 1 / 2, "pass@4": 1.0})
    with pytest.raises(ValueError, match="multiple of 4"):
        compute_pass_rate([1, 0, 0], 4)


def test_statistics_of_nothing_are_nothing():
    assert compute_statistics([]) == {}


def test_only_a_long_text_that_repeats_counts_as_repetition():
    import random

    letters = random.Random(0)
    assert has_repetition("ab" * 6000)
    assert not has_repetition("ab" * 100)
    assert not has_repetition("".join(chr(letters.randrange(33, 126)) for _ in range(12000)))
