"""What is said when a hook returns the wrong thing: the flag, the function as module:function, what came, what is due.

The functions are in user_package/wrong.py; they can be called as slime calls them, so nothing is found before the run.
"""

from __future__ import annotations

import re

import pytest

from slime.rollout.fully_async_rollout import stop_worker
from slime.rollout.hooks.errors import HookError
from slime.rollout.hooks.returns import HookReturnError
from slime.rollout.hooks.sample_errors import SampleError
from tests.contracts.conftest import PATH_FORMS
from tests.contracts.rollout_world import World, rollout

A_SAMPLE = r"sample [0-3] \(prompt [01]: 'p[bc]'\)"
SAMPLE_OR_LIST = "it must return a Sample or a list of them"
NUMBER = "it must be a finite number"
PAIR = "it must return (raw rewards, rewards), two lists with a number for each of the 4 samples"

# attribute of the flag, function of user_package.wrong, the sentence after the flag and the function (S = the sample)
OF_A_ROLLOUT = [
    ("rollout_function_path", "rollout_none", " returned None; it must return a RolloutFnTrainOutput or a list of"),
    ("rollout_function_path", "rollout_dict", " returned a dict; it must return a RolloutFnTrainOutput or a list of"),
    (
        "rollout_function_path",
        "rollout_texts",
        " returned a list that holds something else than samples: expected",
    ),
    ("rollout_function_path", "rollout_nothing", " returned no sample; there is nothing to train on"),
    ("custom_generate_function_path", "generate_none", f" returned 'None' (NoneType) for SAMPLE; {SAMPLE_OR_LIST}"),
    ("custom_generate_function_path", "generate_text", f" returned 'text' (str) for SAMPLE; {SAMPLE_OR_LIST}"),
    ("custom_generate_function_path", "generate_no_sample", f" returned an empty list for SAMPLE; {SAMPLE_OR_LIST}"),
    (
        "custom_generate_function_path",
        "generate_short_mask",
        " returned SAMPLE with a loss_mask of 1 entries for response_length 2; they must be equal",
    ),
    (
        "custom_generate_function_path",
        "generate_negative_token",
        " returned SAMPLE with -1 as token 3 of 4; token ids are whole numbers from 0",
    ),
    ("rollout_function_path", "rollout_twice", " returned one Sample object twice: SAMPLE; return a copy"),
    (
        "rollout_function_path",
        "rollout_null_log_prob",
        " returned SAMPLE, number 1 of the rollout, with None in rollout_log_probs at response token 0, which is",
    ),
    (
        "rollout_function_path",
        "rollout_images",
        " returned SAMPLE, number 0 of the rollout, with 0 images (multimodal_inputs), 0 image_spans and",
    ),
    ("rollout_function_path", "rollout_nan_reward", " returned 'nan' for SAMPLE; it must be a finite number"),
    ("custom_generate_function_path", "generate_error", " failed on SAMPLE: KeyError: 'search'"),
    (
        "custom_generate_function_path",
        "generate_without_async",
        " failed on SAMPLE: TypeError: it is not async, it returned a Sample; write it as `async def`",
    ),
    ("rollout_sample_hook_path", "hook_text", " returned str for SAMPLE; it must return a Sample or None"),
    ("rollout_sample_hook_path", "hook_list", " returned list for SAMPLE; it must return a Sample or None"),
    ("custom_rm_path", "reward_none", f" returned 'None' (NoneType) for SAMPLE; {NUMBER}"),
    ("custom_rm_path", "reward_text", f" returned 'good' (str) for SAMPLE; {NUMBER}"),
    ("custom_rm_path", "reward_nan", f" returned 'nan' for SAMPLE; {NUMBER}"),
    (
        "dynamic_sampling_filter_path",
        "filter_none",
        " failed on SAMPLE: TypeError: it returned None; a filter must return a DynamicFilterOutput or a bool",
    ),
    (
        "dynamic_sampling_filter_path",
        "filter_tuple",
        " failed on SAMPLE: TypeError: it returned a tuple; a filter must return a DynamicFilterOutput or a bool",
    ),
    ("custom_reward_post_process_path", "post_one_list", f" returned a list; {PAIR}"),
    (
        "custom_reward_post_process_path",
        "post_nan_teacher",
        " returned SAMPLE, number 0 of the rollout, with nan in teacher_log_probs at response token 0, which is",
    ),
    ("custom_reward_post_process_path", "post_none", f" returned None; {PAIR}"),
    ("custom_reward_post_process_path", "post_short", f" returned 1 raw and 1 rewards for 4 samples; {PAIR}"),
    ("custom_reward_post_process_path", "post_none_inside", f" returned 'None' for sample 0 of the rollout; {PAIR}"),
    ("custom_rollout_log_function_path", "log_text", " failed: ValueError: metric 'mine/x' is no number: 'high'"),
    ("custom_convert_samples_to_train_data_path", "convert_none", " returned None; it must return a dict of columns"),
    (
        "custom_convert_samples_to_train_data_path",
        "convert_few_columns",
        " returned no raw_reward, truncated, sample_indices, rollout_ids, loss_masks; it must return the columns",
    ),
    (
        "custom_convert_samples_to_train_data_path",
        "convert_uneven",
        " returned 1 loss_masks for 4 samples of tokens; each column must have one entry for each sample",
    ),
    (
        "custom_convert_samples_to_train_data_path",
        "convert_mask",
        " returned sample 0 with 7 in the loss_mask at response token 0; a mask has only zeros and ones",
    ),
    (
        "data_source_path",
        "GivesOneTwice",
        ": get_samples returned one Sample object twice; it must return a list of groups, each a list of Samples",
    ),
    (
        "data_source_path",
        "GivesNothing",
        ": get_samples returned no group, but a rollout needs more; begin the next epoch when the prompts are used up",
    ),
    (
        "data_source_path",
        "GivesSamples",
        ": get_samples returned a list with a Sample in it; it must return a list of groups, each a list of Samples",
    ),
    (
        "data_source_path",
        "GivesNone",
        ": get_samples returned None; it must return a list of groups, each a list of Samples",
    ),
    (
        "data_source_path",
        "OnlyGives",
        " does not fit: OnlyGives has no add_samples and no save and no load and no __len__; a data source needs ",
    ),
    ("data_source_path", "make_nothing", " does not fit: None has no get_samples and no add_samples"),
]


def pattern(flag: str, function: str, sentence: str) -> str:
    """The whole error as a regular expression."""
    option = "--" + flag.replace("_", "-")
    return re.escape(f"{option} user_package.wrong:{function}{sentence}").replace("SAMPLE", A_SAMPLE)


@pytest.mark.parametrize(("flag", "function", "sentence"), OF_A_ROLLOUT)
def test_a_wrong_return_is_named_with_its_flag_and_function(world: World, flag: str, function: str, sentence: str):
    path = f"user_package.wrong.{function}"
    with pytest.raises((HookError, TypeError, ValueError), match=pattern(flag, function, sentence)):
        rollout(world.manager(**{flag: [path] if flag == "rollout_sample_hook_path" else path}), 0)


HOOKS_OF_THE_MANAGER = [
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
]


@pytest.mark.parametrize(
    ("function", "error"), [("exits", "SystemExit: 3"), ("divides_by_zero", "ZeroDivisionError:")]
)
@pytest.mark.parametrize("flag", HOOKS_OF_THE_MANAGER)
def test_an_error_or_exit_in_a_hook_between_rollout_and_trainer_names_it(world: World, flag, function, error):
    manager = world.manager(eval_datasets=[world.data_set("e", "b")], **{flag: f"user_package.wrong.{function}"})
    with pytest.raises(HookError, match=pattern(flag, function, f" failed: {error}")):
        manager.eval(0, step=1) if "eval" in flag else rollout(manager, 0)


@pytest.mark.parametrize("flag", ["rollout_function_path", "eval_function_path", "data_source_path"])
def test_an_exit_in_a_rollout_function_or_data_source_names_it(world: World, flag):
    with pytest.raises(HookError, match=pattern(flag, "exits", " failed: SystemExit: 3")):
        manager = world.manager(**{flag: "user_package.wrong.exits"})
        manager.eval(0, step=1) if "eval" in flag else rollout(manager, 0)


def test_a_data_source_that_gives_nothing_ends_the_fully_async_rollout_too(world: World):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    manager = world.manager(rollout_function_path=path, data_source_path="user_package.wrong.GivesNothing")
    with pytest.raises(
        HookReturnError, match="--data-source-path user_package.wrong:GivesNothing: get_samples returned"
    ):
        rollout(manager, 0)
    stop_worker()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("eval_list", " returned a list; it must return a RolloutFnEvalOutput or its data dict"),
        ("rollout_none", " returned None; it must return a RolloutFnEvalOutput or its data dict"),
        (
            "eval_without_rewards",
            " returned the keys ['samples'] for the data set 'mine'; it must return {\"rewards\": [...], ",
        ),
    ],
)
def test_a_wrong_evaluation_is_named(world: World, function: str, sentence: str):
    manager = world.manager(eval_function_path=f"user_package.wrong:{function}")
    with pytest.raises((TypeError, ValueError), match=pattern("eval_function_path", function, sentence)):
        manager.eval(0, step=1)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            "rewards_number",
            " failed on SAMPLE: TypeError: the reward function got 2 samples and returned 1.0, not",
        ),
        ("rewards_short", " returned 1 rewards for the 2 samples of SAMPLE (--group-rm)"),
    ],
)
def test_wrong_rewards_of_a_group_are_named(world: World, function: str, sentence: str):
    manager = world.manager(custom_rm_path=f"user_package.wrong.{function}", group_rm=True)
    with pytest.raises(SampleError, match=pattern("custom_rm_path", function, sentence)):
        rollout(manager, 0)


def test_a_dict_reward_without_the_key_is_named(world: World):
    manager = world.manager(custom_rm_path="user_package.wrong.reward_dict", reward_key="score")
    sentence = " returned {'points': 1.0} for SAMPLE, which has no 'score' (--reward-key)"
    with pytest.raises(SampleError, match=pattern("custom_rm_path", "reward_dict", sentence)):
        rollout(manager, 0)


def test_siblings_of_several_executions_are_refused(world: World):
    manager = world.manager(custom_generate_function_path="user_package.wrong.generate_two_executions")
    with pytest.raises(SampleError, match=rf"siblings made of {A_SAMPLE} have different rollout_ids: \[1, 2\]"):
        rollout(manager, 0)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("buffer_none", " returned None; it must return a list of groups, each a list of Samples"),
        (
            "buffer_samples",
            " returned a list with a Sample in it; it must return a list of groups",
        ),
        ("buffer_kept", " left 1 of the 1 groups that it returned in the buffer; it must remove them"),
        ("buffer_all", " returned 3 groups; at most 1 were asked for"),
    ],
)
def test_a_wrong_pick_from_the_buffer_is_named(world: World, function: str, sentence: str):
    source = world.manager("bcd", buffer_filter_path=f"user_package.wrong.{function}").data_source
    source.add_samples(source.get_samples(3))
    with pytest.raises(HookReturnError, match=pattern("buffer_filter_path", function, sentence)):
        source.get_samples(1)


def test_what_a_sample_filter_returns_is_ignored_with_a_warning(world: World, caplog: pytest.LogCaptureFixture):
    manager = world.manager(rollout_sample_filter_path="user_package.wrong.filter_that_returns")
    boxes, _ = rollout(manager, 0)
    assert len(boxes[0].inner["rewards"]) == 4
    name = "--rollout-sample-filter-path user_package.wrong:filter_that_returns"
    assert f"{name} returned a list, which is ignored" in caplog.text


@pytest.mark.parametrize("form", PATH_FORMS)
@pytest.mark.parametrize(
    ("flag", "function"), [("custom_rm_path", "reward_none"), ("rollout_function_path", "rollout_none")]
)
def test_a_function_is_named_in_each_form_of_its_path(world: World, form: str, flag: str, function: str):
    manager = world.manager(**{flag: PATH_FORMS[form].format(module="wrong", attribute=function)})
    module = "user_package.wrong" if form != "file" else r"(\S*/)?user_package/wrong\.py"
    with pytest.raises((SampleError, TypeError), match=f"{module}:{function} returned"):
        rollout(manager, 0)


@pytest.mark.parametrize(
    ("attribute", "function", "sentence"),
    [
        ("generate_function_path", "generate_text", "returned 'text'"),
        ("custom_rm_path", "reward_none", "returned 'None'"),
    ],
)
def test_functions_that_a_sample_brings_are_named_as_that(world: World, attribute: str, function: str, sentence: str):
    functions = {
        "generate_function_path": "user_package.hooks.generate",
        "custom_rm_path": "user_package.hooks.reward",
        attribute: f"user_package.wrong.{function}",
    }
    manager = world.manager(
        data_source_path="user_package.hooks.WithFunctions",
        functions={"generate": functions["generate_function_path"], "reward": functions["custom_rm_path"]},
    )
    with pytest.raises(SampleError, match=f"the sample's {attribute} user_package.wrong:{function} {sentence}"):
        rollout(manager, 0)
