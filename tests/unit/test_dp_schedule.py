"""The schedule's invariants, and the contract's worked example."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.dp_schedule import (
    build_dp_schedule,
    expand_bins_by_splitting,
    first_fit_pack,
    packing_lengths,
    split_or_repeat,
)

SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 4,
    "ffn_hidden_size": 16,
    "swiglu": True,
    "padded_vocab_size": 32,
}


def make_args(**changes):
    values = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 300, "micro_batch_size": 1}
    values |= {"balance_data": False, "balance_by_flops": False}
    return SimpleNamespace(**(values | SIZES | changes))


def schedule(lengths, *, dp=2, gbs=4, rollouts=None, group=1, **changes):
    return build_dp_schedule(
        make_args(**changes),
        {"dp_size": dp, "cp_size": 1, "vpp_group": group},
        lengths,
        global_batch_size=gbs,
        rollout_indices=range(len(lengths)) if rollouts is None else rollouts,
    )


def test_the_worked_example_of_the_contract():
    partitions, micro_batches, num_microbatches, global_batch_sizes = schedule([100, 200, 300, 50, 60, 70, 80, 90])
    assert partitions == [[1, 3, 7, 4], [2, 0, 6, 5]]
    assert micro_batches == [[[0], [1], [2, 3]]] * 2
    assert num_microbatches == [2, 1]
    assert global_batch_sizes == [4, 4]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=8, max_size=60),
    dp=st.integers(1, 4),
    per_rank=st.integers(1, 2),
    balance=st.booleans(),
)
def test_every_sample_once_equal_counts_and_no_pack_over_the_cap(lengths, dp, per_rank, balance):
    gbs = dp * per_rank
    plan = schedule(lengths, dp=dp, gbs=gbs, balance_data=balance)
    scheduled = len(lengths) // gbs * gbs
    assert sorted(i for part in plan.partitions for i in part) == list(range(scheduled))
    for rank in range(dp):
        assert len(plan.micro_batch_indices[rank]) == sum(plan.num_microbatches)
        positions = [p for micro_batch in plan.micro_batch_indices[rank] for p in micro_batch]
        assert positions == list(range(len(plan.partitions[rank])))
        step_of = [step for step, count in enumerate(plan.num_microbatches) for _ in range(count)]
        for step, micro_batch in zip(step_of, plan.micro_batch_indices[rank], strict=True):
            samples = [plan.partitions[rank][p] for p in micro_batch]
            assert {sample // gbs for sample in samples} == {step}
            assert len(samples) == 1 or sum(lengths[s] for s in samples) <= 300


def test_samples_of_one_rollout_are_trained_in_the_same_step_and_count_once():
    plan = schedule([10] * 6, dp=1, gbs=2, rollouts=[7, 7, 7, 8, 9, 10], max_tokens_per_gpu=1000)
    assert plan.partitions == [[0, 1, 2, 3, 4, 5]]
    assert plan.micro_batch_indices == [[[0, 1, 2, 3], [4, 5]]]
    assert plan.global_batch_sizes == [2, 2]


def test_static_micro_batches_are_consecutive_chunks():
    plan = schedule([9, 8, 7, 6], use_dynamic_batch_size=False, micro_batch_size=2)
    assert plan.partitions == [[0, 1], [2, 3]]
    with pytest.raises(AssertionError, match="--micro-batch-size"):
        schedule([9, 8, 7, 6], use_dynamic_batch_size=False, micro_batch_size=4)


def test_balanced_ranks_get_the_long_samples_apart():
    lengths = [300, 10, 290, 10]
    strided = schedule(lengths, use_dynamic_batch_size=False)
    balanced = schedule(lengths, use_dynamic_batch_size=False, balance_data=True)
    assert strided.partitions == [[0, 2], [1, 3]]
    assert [sorted(lengths[i] for i in part) for part in balanced.partitions] == [[10, 300], [10, 290]]


def test_too_few_rollouts_or_samples_are_named():
    with pytest.raises(AssertionError, match="3 rollouts were generated but a train step needs 4"):
        schedule([1, 2, 3])
    with pytest.raises(AssertionError, match="cannot fill 4 micro-batches"):
        schedule([1, 2], dp=4, gbs=2)


def test_first_fit_goes_back_to_an_earlier_bin_and_an_oversized_item_is_alone():
    assert first_fit_pack([60, 50, 40, 200], cap=100) == [[0, 2], [1], [3]]


def test_splitting_halves_the_heaviest_bin_by_longest_first():
    # 9 | 8, then 7 joins 8 (8 < 9), then 1 joins 9 (9 < 15)
    assert expand_bins_by_splitting([[0, 1, 2, 3], [4]], [9, 8, 7, 1, 30], 3) == [[0, 3], [4], [1, 2]]


def test_micro_batches_of_equal_work_may_exceed_the_token_budget():
    # 480 tokens need 2 bins of 300; by tokens the long one shares its bin, by work (squares) it is alone
    lengths = [240, 60, 60, 60, 60]
    sizes = {"hidden_size": 1, "kv_channels": 512, "padded_vocab_size": 1, "ffn_hidden_size": 1}
    by_tokens = schedule(lengths, dp=1, gbs=5, **sizes)
    by_work = schedule(lengths, dp=1, gbs=5, balance_by_flops=True, balance_data=True, **sizes)
    assert [sorted(lengths[i] for i in b) for b in packs(by_tokens)] == [[60, 240], [60, 60, 60]]
    assert [sorted(lengths[i] for i in b) for b in packs(by_work)] == [[240], [60, 60, 60, 60]]
    tight = schedule([100, 10, 10, 10], dp=1, gbs=4, balance_by_flops=True, max_tokens_per_gpu=65)
    assert max(len(b) for b in packs(tight)) == 3


def packs(plan):
    """Samples of each micro-batch of the first rank."""
    return [[plan.partitions[0][i] for i in b] for b in plan.micro_batch_indices[0]]


def test_a_micro_batch_passes_neither_the_limit_of_tokens_nor_that_of_images():
    """Their 400 tokens would fit into two micro-batches, their 112 tokens of images need three."""
    totals, spans = [100, 40, 60, 50, 90, 60], [[[0, 30]], [[5, 12]], [], [[1, 5], [9, 5]], [[2, 40]], [[0, 20]]]
    args = make_args(max_image_tokens_per_gpu=40)
    lengths = packing_lengths(args, totals, spans, cp_size=1)
    assert lengths == [30 * 300 / 40, 90, 60, 75, 300, 150]  # only the sample without images keeps its own
    assert (
        packing_lengths(args, totals, None, cp_size=1)
        == totals
        == packing_lengths(make_args(max_image_tokens_per_gpu=None), totals, spans, cp_size=1)
    )
    (partition,), (micro_batches,), *_ = build_dp_schedule(
        args, {"dp_size": 1, "cp_size": 1}, lengths, global_batch_size=6, rollout_indices=range(6)
    )
    for batch in micro_batches:
        samples = [partition[i] for i in batch]
        assert sum(totals[i] for i in samples) <= 300
        assert sum(length for i in samples for _, length in spans[i]) <= 40
    # context-parallel ranks share tokens, and each sees all images
    assert packing_lengths(args, totals, spans, cp_size=2)[0] == 30 * 600 / 40


def test_interleaved_stages_get_multiples_of_their_group_on_every_rank():
    lengths = [100] * 12
    plan = schedule(lengths, dp=2, gbs=12, group=3)  # 4 packs of 300 become 2 x 3
    assert plan.num_microbatches == [3]
    assert [len(b) for b in plan.micro_batch_indices] == [3, 3]
    with pytest.raises(AssertionError, match="2 data-parallel ranks with interleaved groups of 3"):
        schedule(lengths[:4], dp=2, gbs=4, group=3, use_dynamic_batch_size=False)


@pytest.mark.parametrize(("group", "balance_data"), [(1, False), (1, True), (3, True)])
def test_ranks_do_a_micro_batch_twice_where_no_samples_are_left_to_split(group, balance_data):
    """Four executions, one of which has two samples, and none fits beside another."""
    rollouts = [0, 1, 1, 2, 3]
    plan = schedule([300] * 5, dp=2, rollouts=rollouts, group=group, balance_data=balance_data)
    assert plan.num_microbatches == [3] and plan.global_batch_sizes == [4]
    assert plan.partitions == [[0, 2, 4], [1, 3]]
    assert plan.micro_batch_indices == [[[0], [1], [2]], [[0], [1], [1]]]


def test_a_pass_without_gradients_may_do_a_micro_batch_twice():
    assert split_or_repeat([[0, 1], [2]], [5, 5, 5], 4) == [[0], [2], [1], [1]]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 120), max_size=60), cap=st.integers(1, 100))
def test_first_fit_is_that_of_a_search_through_all_bins(lengths, cap):
    bins = []
    for item, length in enumerate(lengths):
        fitting = (b for b in bins if sum(lengths[i] for i in b) + length <= cap)
        target = next(fitting, None)
        bins.append([item]) if target is None else target.append(item)
    assert first_fit_pack(lengths, cap) == bins


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), cap=st.integers(5, 100), more=st.integers(0, 9))
def test_the_heaviest_divisible_bin_is_split_first_whatever_was_split_before(lengths, cap, more):
    bins = first_fit_pack(lengths, cap)
    target = min(len(bins) + more, len(lengths))
    one_by_one = bins
    while len(one_by_one) < target:  # each call looks at all bins anew
        one_by_one = expand_bins_by_splitting(one_by_one, lengths, len(one_by_one) + 1)
    assert expand_bins_by_splitting(bins, lengths, target) == one_by_one
