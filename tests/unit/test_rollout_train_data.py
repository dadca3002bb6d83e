"""Rewards are normalised by group, and samples become columns without losing or inventing anything."""

from __future__ import annotations

import math

import pytest

from slime.rollout.train_data import fill_rollout_ids, normalize_by_group, post_process_rewards, samples_to_train_data
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args


def sample(group=0, reward=0.0, response=(7, 8), **fields):
    tokens = [1, 2, *response]
    return Sample(group_index=group, reward=reward, tokens=tokens, response_length=len(response), **fields)


def flags(**changes):
    args = rollout_args(**{k: v for k, v in changes.items() if k in rollout_args()})
    args.advantage_estimator = "grpo"
    args.rewards_normalization = changes.get("rewards_normalization", True)
    args.grpo_std_normalization = changes.get("grpo_std_normalization", True)
    return args


def test_rewards_lose_their_groups_mean_and_deviation():
    samples = [sample(0, 1.0), sample(0, 3.0), sample(1, 5.0), sample(1, 5.0)]
    raw, rewards = post_process_rewards(flags(), samples)
    std = math.sqrt(((1 - 2) ** 2 + (3 - 2) ** 2) / (2 - 1))
    assert raw == [1.0, 3.0, 5.0, 5.0]
    assert rewards == pytest.approx([-1 / (std + 1e-6), 1 / (std + 1e-6), 0.0, 0.0])


def test_groups_of_different_sizes_do_not_mix():
    samples = [sample(0, 1.0), sample(0, 0.0), sample(1, 10.0), sample(1, 20.0), sample(1, 30.0)]
    rewards = normalize_by_group(samples, [s.reward for s in samples], divide_by_std=False)
    assert rewards == [0.5, -0.5, -10.0, 0.0, 10.0]


def test_the_order_of_samples_does_not_matter():
    samples = [sample(i % 3, float(i * i % 7)) for i in range(9)]
    forward = normalize_by_group(samples, [s.reward for s in samples], divide_by_std=True)
    backward = normalize_by_group(samples[::-1], [s.reward for s in samples[::-1]], divide_by_std=True)
    assert forward == backward[::-1]


def test_a_fan_out_rollout_counts_once():
    alone = sample(0, 0.0, rollout_id=1)
    siblings = [sample(0, 6.0, rollout_id=2) for _ in range(3)]
    rewards = normalize_by_group([alone, *siblings], [0.0, 6.0, 6.0, 6.0], divide_by_std=False)
    assert rewards == [-3.0, 3.0, 3.0, 3.0], "the mean of two executions is 3, not the 4.5 of four samples"


def test_a_group_of_one_becomes_zero_and_raw_rewards_pass_when_normalisation_is_off():
    assert post_process_rewards(flags(), [sample(0, 4.0)])[1] == [0.0]
    assert post_process_rewards(flags(rewards_normalization=False), [sample(0, 4.0)])[1] == [4.0]
    only_centred = post_process_rewards(flags(grpo_std_normalization=False), [sample(0, 4.0), sample(0, 0.0)])[1]
    assert only_centred == [2.0, -2.0]


def test_a_sample_without_a_number_as_reward_is_an_error():
    with pytest.raises(ValueError, match=r"sample 3 \(status aborted\) has no reward"):
        post_process_rewards(flags(), [sample(0, None, index=3, status=Sample.Status.ABORTED)])
    with pytest.raises(ValueError, match="name its number with --reward-key"):
        post_process_rewards(flags(), [sample(0, {"score": 1})])
    assert post_process_rewards(flags(reward_key="score"), [sample(0, {"score": 1})])[0] == [1.0]


def short_post_process(args, samples):
    return [1.0], [2.0]


def test_a_custom_post_process_replaces_the_default_and_must_keep_the_length():
    args = flags(custom_reward_post_process_path=f"{__file__}:short_post_process")
    assert post_process_rewards(args, [sample()]) == ([1.0], [2.0])
    with pytest.raises(ValueError, match="returned 1 raw and 1 rewards for 2 samples"):
        post_process_rewards(args, [sample(), sample()])


def test_the_default_columns():
    samples = [
        sample(index=4, rollout_log_probs=[-0.1, -0.2]),
        sample(index=5, rollout_log_probs=[-0.3, 0.0], loss_mask=[1, 0], status=Sample.Status.TRUNCATED),
    ]
    assert samples_to_train_data(samples, [1, 0], [0.5, -0.5]) == {
        "tokens": [[1, 2, 7, 8]] * 2,
        "response_lengths": [2, 2],
        "rewards": [0.5, -0.5],
        "raw_reward": [1.0, 0.0],
        "truncated": [0, 1],
        "sample_indices": [4, 5],
        "rollout_ids": [0, 1],
        "loss_masks": [[1, 1], [1, 0]],
        "rollout_mask_sums": [2, 1],
        "rollout_log_probs": [[-0.1, -0.2], [-0.3, 0.0]],
    }


def test_siblings_share_the_mask_sum_of_their_execution():
    samples = [sample(rollout_id=9), sample(rollout_id=9, loss_mask=[0, 1]), sample()]
    data = samples_to_train_data(samples, [0] * 3, [0] * 3)
    assert data["rollout_ids"] == [9, 9, 0]
    assert data["rollout_mask_sums"] == [2 + 1, 2 + 1, 2]


def test_a_removed_sample_is_not_trained():
    data = samples_to_train_data([sample(remove_sample=True)], [1], [1])
    assert (data["loss_masks"], data["rollout_mask_sums"]) == ([[0, 0]], [0])


def test_optional_columns_appear_when_any_sample_has_them():
    samples = [sample(), sample(metadata={"round_number": 3, "source_name": "web", "raw_reward": 9})]
    samples[1].train_metadata = {"weight": 2}
    data = samples_to_train_data(samples, [0, 0], [0, 0])
    assert (data["round_number"], data["source_names"]) == ([1, 3], ["unknown", "web"])
    assert data["metadata"] == [None, {"weight": 2}]
    assert data["raw_reward"] == [0.0, 9.0]
    assert "rollout_log_probs" not in data


def test_missing_log_probs_are_neutral_where_nothing_is_trained_and_an_error_elsewhere():
    with_log_probs = sample(rollout_log_probs=[-1.0, -1.0])
    data = samples_to_train_data([with_log_probs, sample(remove_sample=True)], [0, 0], [0, 0])
    assert data["rollout_log_probs"] == [[-1.0, -1.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="sample 8 has no rollout_log_probs, but other samples"):
        samples_to_train_data([with_log_probs, sample(index=8)], [0, 0], [0, 0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask of 1 for 2 response tokens"),
        ({"rollout_log_probs": [0.0]}, "1 rollout_log_probs for 2 tokens"),
    ],
)
def test_lists_of_the_wrong_length_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        samples_to_train_data([sample(**fields)], [0], [0])


def test_a_response_longer_than_the_tokens_is_an_error():
    with pytest.raises(ValueError, match="2 tokens but a response_length of 5"):
        samples_to_train_data([Sample(tokens=[1, 2], response_length=5)], [0], [0])


def test_missing_rollout_ids_become_the_smallest_unused():
    assert fill_rollout_ids([None, 1, None, 0, None]) == [2, 1, 3, 0, 4]
