"""A generate function that makes several samples of one: every hook sees the types that it always sees.

Siblings are one execution: they share a rollout_id, are in one group, and count once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks.sample_errors import SampleError
from slime.utils.types import Sample
from tests.contracts.rollout_world import World, rollout, train_data

Paths = Callable[[str], str]


def fan_out_world(world: World, path: Paths, **changes):
    return world.manager(
        custom_generate_function_path=path("generate_two"),
        rollout_sample_hook_path=[path("mark"), path("replace")],
        dynamic_sampling_filter_path=path("keep_even_as_bool"),
        rollout_sample_filter_path=path("remove_first"),
        rollout_all_samples_process_path=path("see_all"),
        custom_rollout_log_function_path=path("log"),
        **changes,
    )


@pytest.mark.parametrize("group_rm", [False, True])
def test_of_a_fan_out_every_hook_sees_the_same_types(world: World, path: Paths, calls, group_rm):
    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 1}
    manager = fan_out_world(world, path, custom_rm_path=path("reward_group"), group_rm=group_rm, **sizes)
    data = train_data(manager)
    for name in ("mark", "replace", "generate_two"):
        assert all(isinstance(call.args[1], Sample) for call in calls.of(name)), name
    siblings = [0, 0, 1, 1]
    scored = [siblings] if group_rm else [[0, 0], [1, 1]]
    assert sorted([s.index for s in call.args[1]] for call in calls.of("reward_group")) == scored
    assert [sample.index for sample in calls.of("keep_even_as_bool")[0].args[1]] == siblings
    for name in ("remove_first", "see_all"):
        assert [[sample.index for sample in group] for group in calls.of(name)[0].args[1]] == [siblings], name
    assert [sample.index for sample in calls.of("log")[0].args[2]] == siblings
    assert data["rollout_ids"] == siblings and data["response_lengths"] == [1, 2, 1, 2]
    assert data["rollout_mask_sums"] == [2, 2, 3, 3], "the first of the group was removed, its sibling was not"


@pytest.mark.parametrize("name", ["double_rewards", "convert"])
def test_of_a_fan_out_what_makes_train_data_sees_the_flat_list(world: World, path: Paths, calls, name):
    flag = (
        "custom_reward_post_process_path" if name == "double_rewards" else "custom_convert_samples_to_train_data_path"
    )
    manager = fan_out_world(world, path, **{flag: path(name)}, rollout_batch_size=1, over_sampling_batch_size=1)
    data = train_data(manager)
    assert [sample.index for sample in calls.of(name)[0].args[1]] == [0, 0, 1, 1]
    assert data["rewards"] == ([2.0, 4.0, 2.0, 4.0] if name == "double_rewards" else [7.0] * 4)


def test_of_a_fan_out_in_an_evaluation_the_list_is_scored_and_the_last_counts(world: World, path: Paths, calls):
    own = {"custom_generate_function_path": path("generate_two")}
    manager = world.manager(eval_datasets=[world.data_set("e", "b", **own)], custom_rm_path=path("reward_group"))
    [(metrics, _)], _ = manager.eval(0, step=1)
    [call] = calls.of("reward_group")
    assert [sample.response_length for sample in call.args[1]] == [1, 2]
    assert metrics["eval/e"] == 11.0


def test_of_a_fan_out_a_reward_that_samples_bring_scores_one_at_a_time(world: World, path: Paths, calls):
    own = {"custom_generate_function_path": path("generate_two"), "custom_rm_path": path("reward")}
    manager = world.manager(eval_datasets=[world.data_set("e", "b", **own)])
    [(metrics, _)], _ = manager.eval(0, step=1)
    assert [call.args[1].response_length for call in calls.of("reward")] == [1, 2]
    assert metrics["eval/e"] == 2.0


def test_of_a_fan_out_only_samples_without_a_reward_are_in_the_list(world: World, path: Paths, calls):
    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
    manager = world.manager(
        custom_generate_function_path=path("generate_two_one_scored"), custom_rm_path=path("reward_group"), **sizes
    )
    data = train_data(manager)
    [call] = calls.of("reward_group")
    assert [sample.response_length for sample in call.args[1]] == [2]
    assert data["raw_reward"] == [0.5, 10.0]


def test_a_reward_for_one_sample_that_gets_a_list_is_told_why(world: World, path: Paths):
    manager = world.manager(custom_generate_function_path=path("generate_two"), custom_rm_path=path("reward"))
    with pytest.raises(SampleError, match=r"reward \(the list that a generate function returned\) failed"):
        rollout(manager, 0)


def test_of_a_fan_out_the_prompt_goes_back_as_it_was(world: World, path: Paths):
    manager = fan_out_world(world, path, over_sampling_batch_size=6, rollout_batch_size=1)
    rollout(manager, 0)
    source = manager.data_source
    assert isinstance(source, RolloutDataSourceWithBuffer) and source.buffer
    assert all(len(group) == 2 and not group[0].tokens for group in source.buffer)
