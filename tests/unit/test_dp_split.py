"""One rollout's columns cut by data-parallel rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray.rollout.shares import split_train_data

# The schedule's own example: lengths [100, 200, 300, 50, 60, 70, 80, 90], one rollout each.
LENGTHS = [100, 200, 300, 50, 60, 70, 80, 90]
ARGS = {
    "global_batch_size": 4,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 300,
    "micro_batch_size": 1,
    "balance_data": False,
    "balance_by_flops": False,
    "drop_last_rollouts": False,
}


def split(train_data, **changes):
    return split_train_data(SimpleNamespace(**{**ARGS, **changes}), train_data, {"dp_size": 2, "cp_size": 1})


def train_data():
    return {
        "tokens": [[i] * length for i, length in enumerate(LENGTHS)],
        "rollout_ids": list(range(8)),
        "rewards": [float(i) for i in range(8)],
        "extra_column": [f"sample {i}" for i in range(8)],
        "whole_rollout": {"note": "not per sample"},
    }


def test_every_rank_gets_its_partition_of_every_column_in_training_order():
    shares = split(train_data())
    assert [share["partition"] for share in shares] == [[1, 3, 7, 4], [2, 0, 6, 5]]
    for share in shares:
        assert share["rewards"] == [float(i) for i in share["partition"]]
        assert share["total_lengths"] == [LENGTHS[i] for i in share["partition"]]
        assert [tokens[0] for tokens in share["tokens"]] == share["partition"]


def test_columns_of_a_custom_converter_travel_and_whole_rollout_values_go_to_every_rank():
    for share in split(train_data()):
        assert share["extra_column"] == [f"sample {i}" for i in share["partition"]]
        assert share["whole_rollout"] == {"note": "not per sample"}


def test_the_schedule_travels_with_the_share():
    for share in split(train_data()):
        assert share["num_microbatches"] == [2, 1]
        assert share["global_batch_sizes"] == [4, 4]
        positions = [i for micro_batch in share["micro_batch_indices"] for i in micro_batch]
        assert positions == [0, 1, 2, 3]


def test_samples_that_fill_no_train_step_are_refused_or_dropped_where_asked():
    with pytest.raises(ValueError, match="8 samples were generated.*--global-batch-size 3.*last 2.*--drop-last-roll"):
        split(train_data(), global_batch_size=3)
    shares = split(train_data(), global_batch_size=3, drop_last_rollouts=True)
    assert sorted(i for share in shares for i in share["partition"]) == [0, 1, 2, 3, 4, 5], "6 and 7 are the last two"
    for share in shares:
        assert share["global_batch_sizes"] == [3, 3]
        assert share["rewards"] == [float(i) for i in share["partition"]], "no column is longer than what is trained"


def test_samples_that_share_an_execution_count_once_in_a_train_step():
    data = train_data() | {"rollout_ids": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert all(share["global_batch_sizes"] == [4] for share in split(data))


def test_the_limit_of_image_tokens_splits_micro_batches():
    """Every image has as many tokens as the limit, so no two samples share a micro-batch."""
    shares = split(train_data() | {"image_spans": [[[0, 50]]] * 8}, max_image_tokens_per_gpu=50)
    assert {len(samples) for share in shares for samples in share["micro_batch_indices"]} == {1}
    without = split(train_data() | {"image_spans": [[[0, 50]]] * 8}, max_image_tokens_per_gpu=None)
    assert max(len(samples) for share in without for samples in share["micro_batch_indices"]) > 1
