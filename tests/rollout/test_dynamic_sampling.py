"""Filters and over-sampling: reasons are counted, batches are filled, no prompt is lost, no filter loops for ever."""

from __future__ import annotations

import logging

import pytest

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate_rollout

FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
HERE = __file__


async def reward_of_letter(args, sample, **kwargs):
    """Groups of "d" differ in their rewards, all others get one and the same."""
    return float(sample.index) if sample.prompt == "pd" else 1.0


def indices(groups):
    return {sample.index for group in groups for sample in group}


def test_groups_without_a_difference_are_dropped_with_their_reward_as_the_reason(make):
    args, source = make(
        "bdcd",
        custom_rm_path=f"{HERE}:reward_of_letter",
        dynamic_sampling_filter_path=f"{FILTERS}.check_reward_nonzero_std",
    )
    output = generate_rollout(args, 0, source)
    assert [group[0].prompt for group in output.samples] == ["pd", "pd"]
    assert output.metrics == {"rollout/dynamic_filter/drop_zero_std_1.0": 2, "rollout/dropped_ratio": 2 / (2 + 2)}


def test_with_fallback_a_batch_is_filled_from_what_was_asked_for(make, engine):
    args, source = make(
        "bcdb",
        custom_rm_path=f"{HERE}:reward_of_letter",
        dynamic_sampling_filter_path=f"{FILTERS}:check_reward_nonzero_std_with_fallback",
        rollout_batch_size=2,
        over_sampling_batch_size=4,
    )
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 2
    dropped = sum(count for name, count in output.metrics.items() if "/drop_" in name)
    assert dropped <= 2, "two of four may go, then the rest is needed"
    assert len(engine.requests) == 4 * 2, "no further prompt was drawn"


def reject(args, group):
    return DynamicFilterOutput(keep=False, reason="never")


def test_a_filter_that_rejects_everything_is_warned_of_and_ends_the_run_at_its_limit(make, caplog):
    args, source = make(
        "bcdef", dynamic_sampling_filter_path=f"{HERE}:reject", max_dynamic_sampling_rounds=7, rollout_batch_size=2
    )
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError) as caught:
        generate_rollout(args, 0, source)
    (warning,) = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert f"{HERE}:reject dropped {5 * 2} groups in rollout 0, 0 of 2 were accepted" in warning
    assert f"dropped {7 * 2} groups" in str(caught.value)
    assert "drop_never" in str(caught.value) and "--max-dynamic-sampling-rounds is 7" in str(caught.value)


def test_over_sampling_asks_for_more_prompts_and_gives_back_those_it_did_not_use(make):
    args, source = make("bbbbbb", rollout_batch_size=2, over_sampling_batch_size=5)
    output = generate_rollout(args, 0, source)
    assert indices(output.samples) | indices(source.buffer) == set(range(5 * 2))
    assert not indices(output.samples) & indices(source.buffer)


def test_an_error_of_a_group_beyond_the_batch_does_not_spoil_the_batch(make, engine):
    engine.held = {ord("z")}
    args, source = make("bcz", over_sampling_batch_size=3, custom_rm_path=f"{HERE}:reward_or_raise")
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 2 and [g[0].prompt for g in source.buffer] == ["pz"]


async def reward_or_raise(args, sample, **kwargs):
    if sample.prompt == "pz":
        raise ValueError("cannot be scored")
    return 1.0
