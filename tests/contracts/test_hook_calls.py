"""Each hook of a rollout, called exactly as the public interface says: arguments, order, moment.

The functions are in user_package/hooks.py and note how they were called. Every test runs with the three forms of a
path. Hooks of the trainer are listed at the end: their tests come with the trainer's work.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.rollout.base_types import HOOKS
from slime.rollout.sampling.generation import GenerateState
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.contracts.rollout_world import World, rollout, train_data

Status = Sample.Status
Paths = Callable[[str], str]


# 1, 2: whole rollouts and evaluations


def test_a_rollout_function_gets_args_rollout_and_source_and_evaluation_by_name(world: World, path: Paths, calls):
    manager = world.manager(rollout_function_path=path("rollout"))
    data = train_data(manager, 3)
    [call] = calls.of("rollout")
    assert call.args == (manager.args, 3, manager.data_source) and call.kwargs == {"evaluation": False}
    assert data["raw_reward"] == [0.0, 1.0, 0.0, 1.0], "what it returned is trained on"
    _, [(metrics, _)] = rollout(manager, 4)
    assert metrics["rollout/note"] == 4.0, "its metrics are logged verbatim"


@pytest.mark.parametrize(
    ("function", "indices"),
    [("legacy_samples", [0, 1, 2, 3]), ("legacy_groups", [0, 1, 2, 3])]
    + [("legacy_three_levels", [0, 0, 1, 1, 2, 2, 3, 3])],
)
def test_lists_of_samples_groups_or_fan_out_groups_are_rollouts_too(world: World, path: Paths, function, indices):
    data = train_data(world.manager(rollout_function_path=path(function)))
    assert data["sample_indices"] == indices
    assert len(set(data["rollout_ids"])) == 4, "siblings are one execution"


def test_an_evaluation_function_gets_the_same_with_evaluation_true(world: World, path: Paths, calls):
    manager = world.manager(eval_function_path=path("rollout"))
    [(metrics, _)], _ = manager.eval(3, step=5)
    [call] = calls.of("rollout")
    assert call.args == (manager.args, 3, manager.data_source) and call.kwargs == {"evaluation": True}
    assert (metrics["eval/mine"], metrics["eval/note"], metrics["eval/step"]) == (0.5, 5.0, 5)


def test_a_plain_dict_of_data_sets_is_an_evaluation_too(world: World, path: Paths):
    [(metrics, _)], _ = world.manager(eval_function_path=path("legacy_evaluation")).eval(0, step=1)
    assert metrics["eval/mine"] == 0.5 and metrics["eval/mine-truncated_ratio"] == 0.5


# 3: generate functions


def test_a_generate_function_gets_args_sample_and_sampling_parameters(world: World, path: Paths, calls):
    manager = world.manager(custom_generate_function_path=path("generate"), rollout_temperature=0.5)
    data = train_data(manager)
    assert len(calls.of("generate")) == 4
    for call in calls.of("generate"):
        args, sample, params = call.args
        assert args is manager.args and isinstance(sample, Sample) and call.kwargs == {}
        assert params == GenerateState(args).sampling_params and params["temperature"] == 0.5
    assert data["tokens"][0] == [ord("p"), ord("b"), 500, 501]
    assert world.engine.requests == [], "nothing else asked the engine"


def test_evaluation_is_passed_to_a_generate_function_that_has_such_a_parameter(world: World, path: Paths, calls):
    manager = world.manager(
        custom_generate_function_path=path("generate_and_tell"), eval_datasets=[world.data_set("e", "b")]
    )
    assert set(train_data(manager)["response_lengths"]) == {1}
    assert [call.kwargs for call in calls.of("generate_and_tell")] == [{"evaluation": False}] * 4
    manager.eval(0, step=1)
    assert calls.of("generate_and_tell")[4].kwargs == {"evaluation": True}


def test_a_generate_function_holds_one_of_the_places_at_the_engines(world: World, path: Paths):
    manager = world.manager(custom_generate_function_path=path("generate_slowly"), sglang_server_concurrency=3)
    manager.args.rollout_batch_size = manager.args.over_sampling_batch_size = 6
    rollout(manager, 0)
    assert load_function(path("Traffic")).most == 3, "12 samples, 3 places"


def test_a_reward_that_a_generate_function_sets_is_kept(world: World, path: Paths, calls):
    manager = world.manager(custom_generate_function_path=path("generate_with_reward"), custom_rm_path=path("reward"))
    assert train_data(manager)["raw_reward"] == [0.25] * 4
    assert calls.of("reward") == []


def test_a_sample_that_brings_its_own_functions_uses_them(world: World, path: Paths, calls):
    manager = world.manager(
        data_source_path=path("WithFunctions"),
        functions={"generate": path("generate"), "reward": path("reward_without_async")},
        custom_generate_function_path=path("generate_and_tell"),
        custom_rm_path=path("reward"),
    )
    data = train_data(manager)
    assert data["response_lengths"] == data["raw_reward"] == [1, 2, 1, 2]
    assert sorted(call.args[1].index for call in calls.of("generate")) == [1, 3]
    assert sorted(call.args[1].index for call in calls.of("reward_without_async")) == [1, 3]
    assert sorted(call.args[1].index for call in calls.of("reward")) == [0, 2]


def test_an_evaluation_set_brings_its_own_functions(world: World, path: Paths, calls):
    own = {"custom_generate_function_path": path("generate"), "custom_rm_path": path("reward")}
    manager = world.manager(eval_datasets=[world.data_set("own", "d", **own), world.data_set("plain", "d")])
    [(metrics, _)], _ = manager.eval(0, step=1)
    assert (metrics["eval/own"], metrics["eval/plain"]) == (2.0, 3.0)
    [call] = calls.of("generate")
    assert call.args[:2] == (manager.args, call.args[1]) and call.args[2]["max_new_tokens"] == 9
    [call] = calls.of("reward")
    assert call.args[0] is manager.args and isinstance(call.args[1], Sample) and call.kwargs == {}


# 4: sample hooks


def test_sample_hooks_run_in_their_order_and_get_the_keywords_that_they_have(world: World, path: Paths, calls):
    hooks = [path("mark"), path("mark_later"), path("replace")]
    manager = world.manager(rollout_sample_hook_path=hooks, custom_rm_path=path("reward"))
    rollout(manager, 8)
    for name, keywords in {
        "mark": {},
        "mark_later": {"rollout_id": 8, "evaluation": False},
        "replace": {"rollout_id": 8, "evaluation": False},
    }.items():
        assert len(calls.of(name)) == 4
        for call in calls.of(name):
            assert call.args[0] is manager.args and isinstance(call.args[1], Sample) and call.kwargs == keywords
    for call in calls.of("reward"):
        scored = call.args[1]
        assert scored.metadata["marks"] == ["mark", "later 8 False"], "None keeps the sample"
        assert scored.metadata["replaced"], "what a hook returns takes its place, before the reward"


def test_sample_hooks_hear_of_evaluations(world: World, path: Paths, calls):
    manager = world.manager(rollout_sample_hook_path=[path("mark_later")], eval_datasets=[world.data_set("e", "b")])
    manager.eval(2, step=3)
    assert [call.kwargs for call in calls.of("mark_later")] == [{"rollout_id": 2, "evaluation": True}]


# 5: rewards


@pytest.mark.parametrize("name", ["reward", "reward_without_async"])
def test_a_reward_function_gets_one_sample(world: World, path: Paths, calls, name):
    manager = world.manager(custom_rm_path=path(name))
    assert train_data(manager)["raw_reward"] == [1.0, 1.0, 2.0, 2.0]
    for call in calls.of(name):
        assert call.args[0] is manager.args and call.kwargs == {}
        assert isinstance(call.args[1], Sample) and call.args[1].status is Status.COMPLETED


def test_a_process_reward_gets_each_scored_sample(world: World, path: Paths, calls):
    manager = world.manager(process_reward_path=path("rate_tokens"), advantage_estimator="reinforce_plus_plus")
    assert train_data(manager)["token_rewards"] == [[0.0], [0.0], [0.0, 1.0], [0.0, 1.0]]
    for call in calls.of("rate_tokens"):
        assert call.args[0] is manager.args and call.kwargs == {} and call.args[1].reward is not None


def test_with_group_rm_a_reward_function_gets_the_samples_of_a_group(world: World, path: Paths, calls):
    manager = world.manager(custom_rm_path=path("reward_group"), group_rm=True)
    assert train_data(manager)["raw_reward"] == [10.0, 11.0, 10.0, 11.0]
    assert sorted([s.index for s in call.args[1]] for call in calls.of("reward_group")) == [[0, 1], [2, 3]]
    assert all(call.args[0] is manager.args and call.kwargs == {} for call in calls.of("reward_group"))


def test_a_dict_reward_is_read_by_its_key(world: World, path: Paths):
    manager = world.manager(custom_rm_path=path("reward_dict"), reward_key="score")
    assert train_data(manager)["raw_reward"] == [1.0, 1.0, 2.0, 2.0]


def test_an_aborted_sample_is_not_scored(world: World, path: Paths, calls):
    """Letter d is held back until the rollout has its two groups and aborts it."""
    world.engine.held = {ord("d")}
    manager = world.manager("dbc", custom_rm_path=path("reward"), over_sampling_batch_size=3)
    rollout(manager, 0)
    assert {call.args[1].prompt for call in calls.of("reward")} == {"pb", "pc"}


# 6: dynamic filters


@pytest.mark.parametrize(("name", "reason"), [("keep_even", "odd"), ("keep_even_as_bool", "unnamed")])
def test_a_dynamic_filter_gets_each_finished_group_until_enough_are_kept(
    world: World, path: Paths, calls, name, reason
):
    manager = world.manager("bcde", dynamic_sampling_filter_path=path(name))
    _, [(metrics, _)] = rollout(manager, 0)
    for call in calls.of(name):
        args, group = call.args
        assert args is manager.args and call.kwargs == {}
        assert len(group) == 2 and all(sample.reward is not None for sample in group), "it is scored"
    num_dropped = sum(call.args[1][0].group_index % 2 for call in calls.of(name))
    assert metrics[f"rollout/dynamic_filter/drop_{reason}"] == num_dropped > 0


# 7: buffer filters


def test_a_buffer_filter_gets_none_the_buffer_and_how_many(world: World, path: Paths, calls):
    manager = world.manager("bcde", buffer_filter_path=path("pop_last"))
    source = manager.data_source
    source.get_samples(0)
    assert calls.of("pop_last") == [], "an empty buffer has nothing to pick from"
    source.add_samples(groups := source.get_samples(3))
    picked = source.get_samples(2)
    [call] = calls.of("pop_last")
    assert call.args == (manager.args, None, source.buffer, 2) and call.kwargs == {}
    assert call.args[2] is source.buffer and source.buffer == groups[:1]
    assert picked == groups[:0:-1]


# 8, 9: the end of a rollout


def test_a_sample_filter_gets_the_groups_of_the_batch_and_removes_samples(world: World, path: Paths, calls):
    manager = world.manager(rollout_sample_filter_path=path("remove_first"))
    data = train_data(manager)
    [call] = calls.of("remove_first")
    assert call.args[0] is manager.args and call.kwargs == {}
    assert [[sample.index for sample in group] for group in call.args[1]] == [[0, 1], [2, 3]]
    assert data["loss_masks"] == [[0], [1], [0, 0], [1, 1]]


def test_the_hook_for_all_samples_sees_dropped_groups_too_and_the_data_source(world: World, path: Paths, calls):
    manager = world.manager(
        "bcde",
        dynamic_sampling_filter_path=path("keep_even"),
        rollout_all_samples_process_path=path("see_all"),
        rollout_sample_filter_path=path("remove_first"),
    )
    rollout(manager, 0)
    [call] = calls.of("see_all")
    args, groups, source = call.args
    assert args is manager.args and source is manager.data_source and call.kwargs == {}
    indices = [group[0].group_index for group in groups]
    assert indices == sorted(indices) and 1 in indices, "group 1 was dropped"
    assert calls.CALLS.index(call) > calls.CALLS.index(calls.of("remove_first")[0])


def test_the_data_source_of_that_hook_can_be_called_for_prompts(world: World, path: Paths, calls):
    manager = world.manager("bcd", rollout_all_samples_process_path=path("see_all_and_draw"))
    rollout(manager, 0)
    [call] = calls.of("see_all_and_draw")
    assert call.args[1][0][0].metadata["drawn"] == ["pd"], "the prompt after those of the rollout"


# 15 to 18: what becomes of the samples


def test_a_reward_post_process_gets_the_flat_samples_and_gives_both_lists(world: World, path: Paths, calls):
    manager = world.manager(custom_reward_post_process_path=path("double_rewards"))
    data = train_data(manager)
    [call] = calls.of("double_rewards")
    assert call.args[0] is manager.args and call.kwargs == {}
    assert [sample.index for sample in call.args[1]] == [0, 1, 2, 3]
    assert (data["raw_reward"], data["rewards"]) == ([1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 4.0, 4.0])


def test_a_converter_gets_the_flat_samples_and_its_columns_are_trained_on(world: World, path: Paths, calls):
    manager = world.manager(custom_convert_samples_to_train_data_path=path("convert"))
    data = train_data(manager)
    [call] = calls.of("convert")
    assert call.args[0] is manager.args and call.kwargs == {}
    assert [sample.index for sample in call.args[1]] == [0, 1, 2, 3]
    assert data["rewards"] == [7.0] * 4 and data["my_column"] == [0, 10, 20, 30]
    assert data["rollout_mask_sums"] == [1, 1, 2, 2], "filled in: the documents of upstream leave it out"


def test_dict_rewards_are_left_to_a_reward_post_process(world: World, path: Paths):
    manager = world.manager(custom_rm_path=path("reward_dict"), custom_reward_post_process_path=path("count_keys"))
    num_keys = len({"score", "kind"})
    assert train_data(manager)["rewards"] == [num_keys] * 4


@pytest.mark.parametrize(("name", "num_default"), [("log", 0), ("log_too", 1)])
def test_a_rollout_log_function_gets_five_values_and_decides_about_the_default(
    world: World, path: Paths, calls, name, num_default
):
    manager = world.manager(custom_rollout_log_function_path=path(name), rollout_function_path=path("rollout"))
    _, records = rollout(manager, 6)
    [call] = calls.of(name)
    rollout_id, args, samples, extra, seconds = call.args
    assert (rollout_id, args, extra, call.kwargs) == (6, manager.args, {"rollout/note": 4.0}, {})
    assert [sample.index for sample in samples] == [0, 1, 2, 3] and seconds >= 0
    assert len(records) == num_default


@pytest.mark.parametrize(("name", "num_default"), [("log_eval", 0), ("log_eval_too", 1)])
def test_an_evaluation_log_function_gets_four_values_and_decides_about_the_default(
    world: World, path: Paths, calls, name, num_default
):
    manager = world.manager(custom_eval_rollout_log_function_path=path(name), eval_function_path=path("rollout"))
    records, _ = manager.eval(6, step=7)
    [call] = calls.of(name)
    rollout_id, args, data, extra = call.args
    assert (rollout_id, args, extra, call.kwargs) == (6, manager.args, {"eval/note": 5.0}, {})
    assert data["mine"]["rewards"] == [1.0, 0.0]
    assert len(records) == num_default


def test_what_a_log_function_puts_there_or_returns_is_logged_with_the_default(world: World, path: Paths):
    own = {"mine/put": 1.5, "mine/returned": 2.5}
    manager = world.manager(
        custom_rollout_log_function_path=path("log_more"), custom_eval_rollout_log_function_path=path("log_eval_more")
    )
    _, [(metrics, _)] = rollout(manager, 0)
    assert own.items() <= metrics.items() and "rollout/response_len/mean" in metrics
    manager.args.eval_datasets = [world.data_set("one", "b")]
    [(metrics, _)], _ = manager.eval(0, step=0)
    assert own.items() <= metrics.items() and "eval/one" in metrics


# 19: data sources


def test_a_data_source_of_the_user_is_made_of_args_and_asked_as_documented(world: World, path: Paths, calls):
    manager = world.manager(data_source_path=path("Numbers"), over_sampling_batch_size=3)
    data = train_data(manager)
    manager.save(0)
    manager.load(0)
    source = manager.data_source
    assert calls.of("__init__")[0].args == (source, manager.args)
    assert [(call.args[1:], call.kwargs) for call in calls.of("get_samples")] == [((3,), {})]
    [call] = calls.of("add_samples")
    assert call.args[1] == source.returned and [group[0].group_index for group in source.returned] == [2]
    assert [call.args[1:] for call in calls.of("save") + calls.of("load")] == [(0,), (0,)]
    assert manager.get_num_rollout_per_epoch() == 4 // 2
    assert data["response_lengths"] == [1, 1, 2, 2]


# The order


def test_the_hooks_of_one_rollout_come_in_this_order(world: World, path: Paths, calls):
    manager = world.manager(
        "b",
        n_samples_per_prompt=1,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        data_source_path=path("Numbers"),
        custom_generate_function_path=path("generate"),
        rollout_sample_hook_path=[path("mark"), path("mark_later")],
        custom_rm_path=path("reward"),
        dynamic_sampling_filter_path=path("keep_even"),
        rollout_sample_filter_path=path("remove_first"),
        rollout_all_samples_process_path=path("see_all"),
        custom_rollout_log_function_path=path("log"),
        custom_reward_post_process_path=path("double_rewards"),
    )
    rollout(manager, 0)
    assert [call.name for call in calls.CALLS] == [
        *("__init__", "get_samples", "generate", "mark", "mark_later", "reward", "keep_even"),
        *("remove_first", "see_all", "log", "double_rewards"),
    ]


# Every hook of the interface is tested here, or listed with what it waits for

WITH_THE_TRAINER = {
    "rollout_data_postprocess_path": "10: called by the trainer after advantages",
    "custom_loss_function_path": "11: called by the trainer for each micro-batch",
    "custom_advantage_function_path": "12: called by the trainer",
    "custom_tis_function_path": "13: called in the policy loss",
    "custom_pg_loss_reducer_function_path": "14: called in the policy loss",
    "custom_model_provider_path": "20: called when the trainer builds its model",
    "custom_megatron_init_path": "21: called when the trainer starts",
    "custom_megatron_before_log_prob_hook_path": "22: called by the trainer before forward-only passes",
    "custom_megatron_before_train_step_hook_path": "23: called by the trainer before optimizer steps",
    "custom_update_weight_post_write_path": "24: called by the trainer when weights are written as files",
}


def test_every_hook_is_tested_here_or_waits_for_the_trainer() -> None:
    tree = ast.parse(Path(__file__).read_text())
    here = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    here |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(HOOKS) - set(WITH_THE_TRAINER) <= here
    assert set(WITH_THE_TRAINER) < set(HOOKS)
