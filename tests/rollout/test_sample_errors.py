"""A sample whose generation or scoring fails: named with hook, index and prompt, and --on-sample-error obeyed."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from slime.rollout.hooks.sample_errors import SampleError, hook_name
from slime.rollout.sampling.generation import generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.misc import load_function
from slime.utils.types import Sample

Status = Sample.Status
ONE = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 2}
HERE = __file__


def prompts(groups):
    return [group[0].prompt for group in groups]


async def returns_none(args, sample, sampling_params):
    return None


async def returns_text(args, sample, sampling_params):
    return "an answer"


async def returns_nothing(args, sample, sampling_params):
    return []


async def short_mask(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, loss_mask=[1])


async def long_log_probs(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, rollout_log_probs=[0.0] * 9)


async def too_long(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, response_length=99, loss_mask=None, rollout_log_probs=None)


async def nan_log_prob(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, rollout_log_probs=[-0.5, float("nan"), -0.5])


async def unknown_token(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, tokens=[*sample.tokens[:-1], 5000])


async def no_tokens(args, sample, sampling_params):
    return dataclasses.replace(sample, status=Status.FAILED)


async def removed_without_tokens(args, sample, sampling_params):
    return dataclasses.replace(sample, status=Status.COMPLETED, remove_sample=True)


async def no_prompt(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return dataclasses.replace(sample, tokens=sample.tokens[-sample.response_length :])


def hook_drops_tokens(args, sample):
    return dataclasses.replace(sample, tokens=[], response_length=0, loss_mask=None, rollout_log_probs=None)


SHARED: list[Sample] = []  # of the module as the hook path loads it


async def one_for_all(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    SHARED.append(sample)
    return SHARED[0]


def hook_masks_by_half(args, sample):
    sample.loss_mask = [0.5] * sample.response_length


async def raises(args, sample, sampling_params):
    raise KeyError("no such tool")


def hook_raises(args, sample):
    raise ZeroDivisionError("by zero")


def hook_returns_text(args, sample):
    return "text"


async def reward_raises(args, sample, **kwargs):
    raise OSError("service down")


async def reward_nan(args, sample, **kwargs):
    return float("nan")


async def reward_none(args, sample, **kwargs):
    return None


async def reward_text(args, sample, **kwargs):
    return "good"


async def reward_dict(args, sample, **kwargs):
    return {"acc": 1}


async def reward_reads_label(args, sample, **kwargs):
    return float(sample.response == sample.label.strip())


async def rewards_read_labels(args, samples, **kwargs):
    return [float(sample.response == sample.label.strip()) for sample in samples]


def reward_reads_no_label(args, sample, **kwargs):
    return {"good": 1.0}[sample.response]


async def too_few(args, samples, **kwargs):
    return [1.0]


def filter_none(args, group):
    return None


GENERATE, REWARD, HOOK = "custom_generate_function_path", "custom_rm_path", "rollout_sample_hook_path"
WRONG = [
    (GENERATE, "returns_none", r"returned 'None' \(NoneType\) for .*must return a Sample or a list"),
    (GENERATE, "returns_text", r"returned 'an answer' \(str\) for .*must return a Sample"),
    (GENERATE, "returns_nothing", r"returned an empty list for"),
    (GENERATE, "short_mask", r"with a loss_mask of 1 entries for response_length 3"),
    (GENERATE, "long_log_probs", r"with a rollout_log_probs of 9 entries for response_length 3"),
    (GENERATE, "too_long", r"with response_length 99 but only 5 tokens"),
    (GENERATE, "nan_log_prob", r"with nan in rollout_log_probs at response token 1, which is trained"),
    (GENERATE, "unknown_token", r"with 5000 as token 4 of 5; token ids are whole numbers from 0 to 4999"),
    (GENERATE, "no_tokens", r"with 0 tokens and response_length 0; a trained sample needs a prompt of at least one"),
    (GENERATE, "removed_without_tokens", r"with 0 tokens and response_length 0; a trained sample needs a prompt"),
    (GENERATE, "no_prompt", r"with 3 tokens and response_length 3; a trained sample needs a prompt of at least one"),
    (HOOK, "hook_drops_tokens", r"with 0 tokens and response_length 0; a trained sample needs a prompt"),
    (GENERATE, "one_for_all", r"returned one Sample object twice"),
    (HOOK, "hook_masks_by_half", r"with 0\.5 in the loss_mask at response token 0"),
    (GENERATE, "raises", r"failed on .*KeyError: 'no such tool'"),
    (HOOK, "hook_raises", r"failed on .*ZeroDivisionError: by zero"),
    (HOOK, "hook_returns_text", r"returned str for .*must return a Sample or None"),
    (REWARD, "reward_raises", r"failed on .*OSError: service down"),
    (REWARD, "reward_nan", r"returned 'nan' for .*finite number"),
    (REWARD, "reward_none", r"returned 'None' \(NoneType\) for .*finite number"),
    (REWARD, "reward_text", r"returned 'good' \(str\) for .*finite number"),
    (
        REWARD,
        "reward_dict",
        r"returned a dict for .*, with the keys \['acc'\]; --reward-key must name the one that is",
    ),
    (REWARD, "reward_reads_label", r"AttributeError: .* \(the sample has no label: --label-key was not given\)$"),
    (REWARD, "reward_reads_no_label", r"KeyError: 'xxx'$"),
    ("dynamic_sampling_filter_path", "filter_none", r"failed on .*TypeError: it returned None"),
]


@pytest.mark.parametrize(("flag", "function", "message"), WRONG)
def test_what_went_wrong_names_the_hook_the_sample_and_its_prompt(make, flag, function, message):
    path = f"{HERE}:{function}"
    args, source = make("d", vocab_size=5000, **ONE, **{flag: [path] if flag == HOOK else path})
    with pytest.raises(SampleError, match=message) as caught:
        generate_rollout(args, 0, source)
    text = str(caught.value)
    assert f"--{flag.replace('_', '-')} {path} " in text
    assert "sample 0 (prompt 0: 'pd')" in text or "sample 1 (prompt 0: 'pd')" in text
    assert "\n" not in text


def test_a_dict_reward_without_the_named_key_says_which_keys_there_are(make):
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:reward_dict", reward_key="score")
    with pytest.raises(SampleError, match=r"reward_dict returned \{'acc': 1\} for .*no 'score' \(--reward-key\)"):
        generate_rollout(args, 0, source)


def test_dict_rewards_without_a_key_follow_the_policy(make):
    """At the sample, so that the policy can go on; the 17th dropped group of a batch of one ends the run."""
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:reward_dict", on_sample_error="drop")
    with pytest.raises(
        RuntimeError, match=r"--on-sample-error drop: 17 groups of rollout 0 failed.*--reward-key must"
    ):
        generate_rollout(args, 0, source)


def test_a_group_reward_that_reads_labels_says_that_there_are_none(make):
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:rewards_read_labels", group_rm=True)
    with pytest.raises(SampleError, match=r"\(the sample has no label: --label-key was not given\)$"):
        generate_rollout(args, 0, source)


def test_a_label_that_is_there_is_not_said_to_be_missing(make):
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:reward_reads_label")
    group = [Sample(prompt="pd", index=0, group_index=0, label=3)]  # an int has no strip either
    source.get_samples = lambda n: [group]
    with pytest.raises(SampleError, match=r"'int' object has no attribute 'strip'$"):
        generate_rollout(args, 0, source)


def test_a_group_reward_of_the_wrong_count_is_an_error_with_both_counts(make):
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:too_few", group_rm=True)
    with pytest.raises(SampleError, match=r"too_few returned 1 rewards for the 2 samples of .*\(--group-rm\)"):
        generate_rollout(args, 0, source)


async def post_processed(args, sample, **kwargs):
    return ["teacher", 1]


def test_a_reward_of_any_kind_is_left_to_the_post_processing_hook(make):
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:post_processed", custom_reward_post_process_path="a:b")
    assert generate_rollout(args, 0, source).samples[0][0].reward == ["teacher", 1]


def test_a_prompt_beyond_the_engines_context_shows_what_the_engine_said(make, engine):
    engine.fail_with = (400, "The input (9000 tokens) is longer than the model's context length (4096).")
    args, source = make("d", **ONE)
    with pytest.raises(SampleError, match=r"/generate failed on sample 0 \(prompt 0: 'pd'\): .*HTTP 400: The input"):
        generate_rollout(args, 0, source)


def test_the_head_of_a_long_prompt_is_shown_not_all_of_it(make):
    args, source = make("d", **ONE, custom_generate_function_path=f"{HERE}:raises")
    group = [Sample(prompt="x" * 500, index=7, group_index=3)]
    source.get_samples = lambda n: [group]
    with pytest.raises(SampleError, match=r"sample 7 \(prompt 3: 'x{60}\.\.\.'\)"):
        generate_rollout(args, 0, source)


def test_a_failing_group_is_dropped_replaced_and_counted(make, engine):
    engine.fail_with, engine.fails_on = (400, "too long"), {ord("z")}
    args, source = make("zbzc", on_sample_error="drop", rollout_batch_size=2, over_sampling_batch_size=1)
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pb", "pc"]
    assert output.metrics == {"rollout/sample_errors/dropped_groups": 2.0, "rollout/dropped_ratio": 2 / (2 + 2)}
    assert source.buffer == []


def test_a_group_is_tried_again_from_its_prompt_and_then_completes(make):
    args, source = make("d", **ONE, on_sample_error="retry", custom_generate_function_path=f"{HERE}:third_time")
    output = generate_rollout(args, 0, source)
    assert output.metrics == {"rollout/sample_errors/retried_groups": 2.0}
    assert [(s.index, s.response_length, s.metadata) for s in output.samples[0]] == [(0, 3, {}), (1, 3, {})]


BAD: list[int] = []  # of the module as the hook path loads it


async def bad_once(args, sample, sampling_params):
    BAD.append(1)
    if len(BAD) == 1:
        return await nan_log_prob(args, sample, sampling_params)
    return await generate(args, sample, sampling_params)


async def empty_once(args, sample, sampling_params):
    BAD.append(1)
    if len(BAD) == 1:
        return await no_tokens(args, sample, sampling_params)
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("function", ["bad_once", "empty_once"])
@pytest.mark.parametrize("policy", ["retry", "drop"])
def test_a_sample_that_cannot_be_trained_on_follows_the_policy(make, policy, function):
    load_function(f"{HERE}:BAD").clear()
    args, source = make("dd", on_sample_error=policy, **ONE, custom_generate_function_path=f"{HERE}:{function}")
    output = generate_rollout(args, 0, source)
    counted = {"retry": "retried_groups", "drop": "dropped_groups"}[policy]
    ratio = {"rollout/dropped_ratio": 1 / (1 + 1)} if policy == "drop" else {}
    assert output.metrics == {f"rollout/sample_errors/{counted}": 1.0, **ratio}
    assert [s.rollout_log_probs for s in output.samples[0]] == [[-0.5, -1.5, -2.5]] * 2


UNTRAINED = [{"debug_rollout_only": True}, {"custom_convert_samples_to_train_data_path": "a:b"}]


@pytest.mark.parametrize("changes", UNTRAINED)
def test_a_sample_without_tokens_is_kept_where_nothing_trains_on_it_as_it_is(make, changes):
    args, source = make("d", **ONE, custom_generate_function_path=f"{HERE}:no_tokens", **changes)
    assert [sample.tokens for sample in generate_rollout(args, 0, source).samples[0]] == [[], []]


TRIES: list[int] = []  # of the module as the hook path loads it


async def third_time(args, sample, sampling_params):
    sample.metadata["tried"] = True
    if sample.index == 0:
        TRIES.append(1)
        if len(TRIES) < 3:
            raise ValueError("not yet")
    sample.metadata.clear()
    return await generate(args, sample, sampling_params)


async def always_fails(args, sample, sampling_params):
    if sample.prompt == "pz":
        raise ValueError("never")
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_group_that_keeps_failing_is_tried_as_often_as_the_flag_says_and_dropped(make, retries):
    changes = {"on_sample_error": "retry", "max_group_retries": retries, **ONE, "n_samples_per_prompt": 1}
    args, source = make("zd", custom_generate_function_path=f"{HERE}:always_fails", **changes)
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pd"]
    assert output.metrics.get("rollout/sample_errors/retried_groups", 0) == retries
    assert output.metrics["rollout/sample_errors/dropped_groups"] == 1


def test_what_the_engine_refuses_is_not_tried_again(make, engine):
    engine.fail_with, engine.fails_on = (400, "too long"), {ord("z")}
    args, source = make("zd", on_sample_error="retry", **{**ONE, "n_samples_per_prompt": 1})
    generate_rollout(args, 0, source)
    assert sum(r["input_ids"][-1] == ord("z") for r in engine.requests) == 1


def test_a_run_in_which_everything_fails_ends_instead_of_dropping_for_ever(make, engine):
    engine.fail_with = (400, "too long")
    args, source = make("d", on_sample_error="drop", **ONE)
    with pytest.raises(
        RuntimeError, match=r"--on-sample-error drop: 17 groups of rollout 0 failed, 0 of 1 .*too long"
    ):
        generate_rollout(args, 0, source)


def test_an_error_crosses_processes_with_its_text():
    error = pickle.loads(pickle.dumps(SampleError("sample 3 failed", is_final=True)))
    assert (str(error), error.is_final) == ("sample 3 failed", True)


@pytest.mark.parametrize("path", ["pkg.mod.fn", "pkg.mod:fn"])
def test_a_hook_is_named_as_module_and_function(path):
    assert hook_name(path) == "pkg.mod:fn"
