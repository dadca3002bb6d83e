"""Batch arithmetic of a plan."""

from __future__ import annotations

import pytest

from slime.plan.layout import MEAN_SHARE, DataFacts, ParallelLayout, batch_plan, lengths_of
from tests.unit.plan_fakes import plan_args


def batch_of(facts: DataFacts | None = None, **changes):
    args = plan_args(rollout_max_prompt_len=100, rollout_max_response_len=400, **changes)
    return batch_plan(args, ParallelLayout.of(args, 4), facts)


def test_samples_make_steps_and_the_rest_is_named():
    batch = batch_of(global_batch_size=12)
    assert (batch.samples_per_rollout, batch.steps_per_rollout, batch.samples_dropped) == (8 * 4, 2, 32 - 24)


def test_expected_lengths_are_a_share_of_the_longest():
    lengths = batch_of().lengths
    assert (lengths.longest, lengths.mean) == (500, 100 + 400 * MEAN_SHARE)


def test_measured_prompts_count_where_all_were_measured():
    whole, part = DataFacts(5, 5, 20, 31), DataFacts(500, 200, 20, 31)
    assert batch_of(whole).lengths.max_prompt == 31
    assert batch_of(part).lengths.max_prompt == 100  # a longer one may follow, up to the limit
    assert batch_of(part).lengths.mean_prompt == 20


def test_a_context_limit_bounds_prompt_and_response_together():
    args = plan_args(rollout_max_context_len=300, rollout_max_prompt_len=100, rollout_max_response_len=400)
    lengths = lengths_of(args, None)
    assert (lengths.max_prompt, lengths.max_response) == (100, 200)


def test_dynamic_micro_batches_fill_the_token_budget():
    batch = batch_of(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=900,
        data_pad_size_multiplier=128,
    )
    # 3 samples of the expected 300 tokens fit into 900, so 32 samples make 11; 900 tokens are padded to 8 x 128.
    assert (batch.micro_batches_per_rank, batch.micro_batch_tokens) == (11, 1024)
    assert batch.micro_batch_response_tokens == 900 * 400 / 500


def test_a_sample_longer_than_the_budget_is_a_micro_batch():
    batch = batch_of(use_dynamic_batch_size=True, max_tokens_per_gpu=256, data_pad_size_multiplier=1)
    assert (batch.micro_batch_tokens, batch.micro_batches_per_rank) == (500, 32)


def test_a_micro_batch_holds_no_more_than_a_step_has():
    batch = batch_of(
        use_dynamic_batch_size=True, max_tokens_per_gpu=10**6, data_pad_size_multiplier=1, global_batch_size=4
    )
    assert batch.micro_batch_tokens == 4 * 500
    assert batch.log_prob_tokens == 32 * 500  # a pass without gradients packs the whole rollout


def test_passes_without_gradients_have_a_budget_of_their_own():
    batch = batch_of(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=1000,
        log_probs_max_tokens_per_gpu=3000,
        data_pad_size_multiplier=1,
    )
    assert (batch.micro_batch_tokens, batch.log_prob_tokens) == (1000, 3000)


def test_static_micro_batches_hold_samples_of_the_longest_kind():
    batch = batch_of(micro_batch_size=2, data_pad_size_multiplier=1, actor_num_gpus_per_node=4)
    assert (batch.micro_batch_tokens, batch.micro_batch_response_tokens) == (2 * 500, 2 * 400)
    assert batch.micro_batches_per_rank == 32 / 2 / 4  # over four data-parallel ranks


def test_context_parallelism_splits_a_sequence_over_its_ranks():
    batch = batch_of(micro_batch_size=2, data_pad_size_multiplier=1, context_parallel_size=2)
    assert batch.micro_batch_tokens == 2 * 500 / 2


@pytest.mark.parametrize(
    ("changes", "rows", "rollouts", "epochs"),
    [
        ({"num_rollout": 10}, 40, 10, 10 * 8 / 40),
        ({"num_rollout": None, "num_epoch": 3}, 44, 3 * (44 // 8), 15 * 8 / 44),
        ({"num_rollout": None, "num_epoch": 3}, None, None, None),
        ({"num_rollout": 10}, None, 10, None),
    ],
)
def test_rollouts_and_epochs(changes, rows, rollouts, epochs):
    batch = batch_of(None if rows is None else DataFacts(rows), **changes)
    assert (batch.num_rollouts, batch.epochs) == (rollouts, epochs)
