"""Metrics of rollouts and evaluations from hand-made samples."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.observability.metric_utils import compute_pass_rate, compute_statistics, has_repetition
from slime.observability.rollout_metrics import agent_metrics, compute_eval_metrics, compute_rollout_metrics
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample

FLAGS = {
    "reward_key": None,
    "log_passrate": True,
    "log_multi_turn": False,
    "log_reward_category": None,
    "log_correct_samples": False,
    "rollout_num_gpus": 2,
    "n_samples_per_prompt": 2,
    "n_samples_per_eval_prompt": 2,
    "eval_datasets": [],
    "overlong_buffer_len": None,
    "overlong_penalty_factor": 1.0,
    "rollout_max_response_len": 8,
}
ARGS = Namespace(**FLAGS)


def sample(group: int, reward: float, length: int, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(
        group_index=group, reward=reward, response_length=length, loss_mask=[1] * (length - 1) + [0], status=status
    )


def test_groups_of_one_sample_are_not_called_groups_without_a_signal():
    metrics = compute_rollout_metrics(ARGS, [sample(0, 0, 2), sample(1, 0, 3)], 2.0)
    assert metrics["rollout/zero_std/count_0"] == 2 and "rollout/zero_std/fraction" not in metrics


def test_rollout_metrics_have_the_contracts_names_and_values():
    samples = [sample(0, 1, 2), sample(0, 1, 4), sample(1, 0, 3), sample(1, 1, 7, Sample.Status.TRUNCATED)]
    metrics = compute_rollout_metrics(ARGS, samples, 2.0)
    effective = [1, 3, 2, 6]
    assert metrics["rollout/response_len/mean"] == sum(effective) / 4
    assert metrics["rollout/response_len/max"] == 6
    assert metrics["rollout/truncated_ratio"] == 1 / 4
    assert metrics["rollout/zero_std/count_1"] == 1 and "rollout/zero_std/count_0" not in metrics
    assert metrics["rollout/zero_std/fraction"] == 1 / 2  # of two groups
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == (2 + 4 + 3 + 7) / 2.0 / 2
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == sum(effective) / 2.0 / 2
    assert metrics["passrate/pass@1"] == 3 / 4
    assert metrics["passrate/pass@2"] == 1.0


def test_what_engines_say_of_their_calls_is_logged_for_traced_samples():
    samples = [sample(0, 1, 2), sample(0, 1, 4)]
    assert not [name for name in compute_rollout_metrics(ARGS, samples, 1.0) if "request/" in name]
    for one, latency in zip(samples, (1.0, 3.0), strict=True):
        with trace_span(one, "engine call") as span:
            meta = {"e2e_latency": latency, "queue_time": 0.5, "decode_throughput": 40.0, "id": "x"}
            span.update(build_sglang_meta_trace_attrs(meta))
    metrics = compute_rollout_metrics(ARGS, samples, 1.0)
    assert metrics["perf/request/e2e_latency/mean"] == (1.0 + 3.0) / 2
    assert metrics["perf/request/e2e_latency/max"] == 3.0
    assert metrics["perf/request/queue_time/median"] == 0.5
    assert metrics["perf/decode/throughput/min"] == 40.0


def test_time_without_generation_is_taken_off_the_longest_response():
    samples = [sample(0, 1, 4), sample(0, 1, 8)]
    samples[1].loss_mask = [1, 1] + [0] * 6  # a tool wrote most of it
    samples[0].non_generation_time, samples[1].non_generation_time = 1.0, 6.0
    metrics = compute_rollout_metrics(ARGS, samples, 10.0)
    assert metrics["perf/longest_sample_non_generation_time"] == 6.0
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 8 / (10 - 6)
    assert metrics["perf/longest_effective_sample_non_generation_time"] == 1.0
    assert metrics["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] == 3 / (10 - 1)
    assert metrics["perf/non_generation_time/mean"] == (1 + 6) / 2


def changed(**flags) -> Namespace:
    return Namespace(**FLAGS | flags)


def test_turns_and_lengths_without_tool_output_are_logged_where_asked():
    samples = [sample(0, 1, 4), sample(0, 0, 2)]  # one token of each is not the model's
    samples[0].metadata["round_number"] = 5
    metrics = compute_rollout_metrics(changed(log_multi_turn=True), samples, 1.0)
    assert metrics["multi_turn/raw_response_length/mean"] == (4 + 2) / 2
    assert metrics["multi_turn/raw_response_length/max"] == 4
    assert metrics["multi_turn/wo_obs_response_length/mean"] == (3 + 1) / 2
    assert metrics["multi_turn/multi_turn_metric/round_number_max"] == 5
    assert metrics["multi_turn/multi_turn_metric/round_number_mean"] == (5 + 1) / 2, "one turn where nothing is said"
    assert not [name for name in compute_rollout_metrics(ARGS, samples, 1.0) if name.startswith("multi_turn/")]


def test_the_values_of_one_key_of_the_rewards_are_shares_of_the_scored_samples():
    samples = [sample(0, 1, 2) for _ in range(5)]
    for one, category in zip(samples, ["format", "format", "none", 7, None], strict=True):
        one.reward = None if category is None else {"score": 1.0, "kind": category}
    args = changed(reward_key="score", log_passrate=False, log_reward_category="kind")
    categories = {name: value for name, value in compute_rollout_metrics(args, samples, 1.0).items() if "_cat" in name}
    assert categories == {
        "rollout/error_cat/7": 1 / 4,
        "rollout/error_cat/format": 2 / 4,
        "rollout/error_cat/none": 1 / 4,
    }
    args.log_reward_category = None
    assert not [name for name in compute_rollout_metrics(args, samples, 1.0) if "error_cat" in name]


def test_a_reward_without_the_category_is_an_error_that_names_the_flag():
    with pytest.raises(ValueError, match="--log-reward-category kind: the reward 1 has no such key"):
        compute_rollout_metrics(changed(log_reward_category="kind"), [sample(0, 1, 2)], 1.0)


def test_correct_samples_have_metrics_of_their_own_where_asked():
    samples = [sample(0, 1, 3), sample(0, 0.9, 9), sample(1, 1, 5, Sample.Status.TRUNCATED), sample(1, 0, 7)]
    metrics = compute_rollout_metrics(changed(log_correct_samples=True), samples, 1.0)
    assert metrics["rollout/correct_ratio"] == 2 / 4
    assert metrics["rollout/correct_response_len/mean"] == (2 + 4) / 2
    assert metrics["rollout/correct_truncated_ratio"] == 1 / 2
    assert not [name for name in compute_rollout_metrics(ARGS, samples, 1.0) if "correct" in name]
    none = compute_rollout_metrics(changed(log_correct_samples=True), samples[1:2], 1.0)
    assert none["rollout/correct_ratio"] == 0 and "rollout/correct_response_len/mean" not in none


def test_eval_metrics_are_per_data_set():
    samples = [sample(0, 1, 2), sample(0, 0, 4)]
    metrics = compute_eval_metrics(ARGS, {"add": {"rewards": [1, 0], "truncated": [True, False], "samples": samples}})
    assert metrics["eval/add"] == 0.5
    assert metrics["eval/add-truncated_ratio"] == 0.5
    assert metrics["eval/add/response_len/mean"] == (1 + 3) / 2
    assert metrics["eval/add-pass@1"] == 0.5 and metrics["eval/add-pass@2"] == 1.0


def test_a_data_set_with_repetitions_of_its_own_has_its_own_pass_rates():
    samples, rewards = [sample(0, 1, 2), sample(0, 0, 2), sample(0, 0, 2), sample(0, 0, 2)], [1, 0, 0, 0]
    config = EvalDatasetConfig("add", "add.jsonl", n_samples_per_eval_prompt=4)
    args = Namespace(**FLAGS | {"eval_datasets": [config]})
    metrics = compute_eval_metrics(args, {"add": {"rewards": rewards, "samples": samples}})
    assert metrics["eval/add-pass@2"] == 1 - (3 / 4) * (2 / 3) and metrics["eval/add-pass@4"] == 1.0
    without = compute_eval_metrics(ARGS, {"add": {"rewards": rewards, "samples": samples}})
    assert "eval/add-pass@2" not in without, "two repetitions were asked for by flag, and there are four"


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


def test_what_agents_lose_is_summed_and_what_they_do_is_averaged():
    def sample(turns, **counts):
        agent = {"turns": turns, "breaks": 0, "forks": 0, "masked_tokens": 0, "template_drift": 0} | counts
        return Sample(metadata={"agent": agent, "ill_formed": turns == 3})

    made = [sample(1, breaks=1, masked_tokens=5), sample(3, forks=1, masked_tokens=2, template_drift=8), Sample()]
    sums = {"breaks": 1, "forks": 1, "masked_tokens": 7}
    assert agent_metrics(made) == {**sums, "turns": 2.0, "template_drift": 4.0, "ill_formed": 0.5}
    assert agent_metrics([Sample()]) == {}
