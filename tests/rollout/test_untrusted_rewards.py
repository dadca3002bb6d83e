"""A reward that says nothing never reaches the loss, and changes nothing of the samples next to it."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics

import numpy as np
import pytest
import torch

from slime.algorithms.advantages import Advantages
from slime.algorithms.estimators import GREEDY_REWARD
from slime.observability.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from slime.rollout.collector import Collector
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.hooks.returns import check_trainable
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.rm_hub.service import RewardError
from slime.rollout.sampling.generation import GenerateState, generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import filter_train_data, mask_untrusted, post_process_rewards, samples_to_train_data
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.rollout.test_evaluation import evaluate  # noqa: F401 - a fixture
from tests.unit.rollout_fakes import rollout_args

HERE = __file__
Status = Sample.Status
TRIES: list[int] = []  # of the module as the hook path loads it
POISON = 1e6
"""The reward of an untrusted sample: whatever it reaches, it shows."""


def lost(sample: Sample, reason: str = "env_error") -> Sample:
    sample.end_reason, sample.reward_is_trusted = reason, False
    return sample


async def first_of_c_is_lost(args, sample, sampling_params):
    """The first sample of each prompt "pc" has no environment."""
    await generate(args, sample, sampling_params)
    if sample.prompt == "pc" and sample.index % args.n_samples_per_prompt == 0:
        sample.reward = POISON
        lost(sample)
    return sample


async def lost_once(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    TRIES.append(sample.index)
    return lost(sample) if TRIES.count(sample.index) == 1 and sample.index == 0 else sample


async def always_lost(args, sample, sampling_params):
    TRIES.append(sample.index)
    await generate(args, sample, sampling_params)
    return lost(sample)


async def lost_before_its_first_token(args, sample, sampling_params):
    if sample.index % 2:
        return await generate(args, sample, sampling_params)
    sample.status = Status.FAILED
    return lost(sample)


async def lost_siblings(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    second = copy.deepcopy(sample)
    return [sample, lost(second)]


async def reward_says_so(args, sample, **kwargs):
    if sample.prompt == "pc":
        lost(sample, "grader_error")
        return None
    return 1.0


async def judges_groups(args, samples, **kwargs):
    if len(samples) == 1:
        return [float(samples[0].reward_is_trusted)]
    raise RewardError("a judge", "failed", sample_index=0, answer="no")


def spread(args, samples, **kwargs):
    assert all(sample.reward is not None for sample in samples)
    return check_reward_nonzero_std(args, samples)


def shown(groups):
    return [[(s.prompt, s.reward, s.end_reason, s.reward_is_trusted) for s in group] for group in groups]


def test_a_lost_sample_stays_in_its_group_by_default(make):
    args, source = make("bc", custom_generate_function_path=f"{HERE}:first_of_c_is_lost")
    output = generate_rollout(args, 0, source)
    good, bad = ("pc", 2.0, "done", True), ("pc", POISON, "env_error", False)
    assert shown(output.samples) == [[("pb", 1.0, "done", True)] * 2, [bad, good]]


def test_a_group_with_a_lost_sample_is_replaced_and_counted_with_drop(make):
    args, source = make("bcd", on_untrusted_reward="drop", custom_generate_function_path=f"{HERE}:first_of_c_is_lost")
    output = generate_rollout(args, 0, source)
    assert [group[0].prompt for group in output.samples] == ["pb", "pd"]
    assert output.metrics["rollout/dynamic_filter/drop_untrusted_reward"] == 1
    assert output.metrics["rollout/dropped_ratio"] == 1 / (1 + 2)


def test_dropping_for_ever_ends_the_rollout_by_the_flags_name(make):
    changes = {"max_dynamic_sampling_rounds": 3, "custom_generate_function_path": f"{HERE}:always_lost"}
    args, source = make("b", on_untrusted_reward="drop", **changes)
    with pytest.raises(RuntimeError, match=r"--on-untrusted-reward drop dropped 6 groups .*max-dynamic-sampling-rou"):
        generate_rollout(args, 0, source)


def test_a_lost_sample_is_made_again_with_retry_and_its_group_is_not(make):
    tries = load_function(f"{HERE}:TRIES")
    tries.clear()
    args, source = make("bc", on_untrusted_reward="retry", custom_generate_function_path=f"{HERE}:lost_once")
    output = generate_rollout(args, 0, source)
    assert sorted(tries) == [0, 0, 1, 2, 3] and output.metrics["rollout/untrusted_retries"] == 1
    first = output.samples[0][0]
    assert (first.index, first.response_length, first.end_reason, first.reward) == (0, 1, "done", 1.0)
    assert all(sample.reward_is_trusted for group in output.samples for sample in group)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_sample_that_is_lost_again_and_again_is_masked_in_the_end(make, retries):
    tries = load_function(f"{HERE}:TRIES")
    tries.clear()
    changes = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
    changes |= {"max_group_retries": retries, "custom_generate_function_path": f"{HERE}:always_lost"}
    args, source = make("b", on_untrusted_reward="retry", **changes)
    [[sample]] = generate_rollout(args, 0, source).samples
    assert tries == [0] * (1 + retries) and not sample.reward_is_trusted


def test_a_lost_sample_is_not_graded_unless_it_is_kept(make):
    for policy, reward in (("mask", None), ("keep", 1.0)):
        args, source = make(
            "b", on_untrusted_reward=policy, custom_generate_function_path=f"{HERE}:always_lost", rollout_batch_size=1
        )
        assert [s.reward for s in generate_rollout(args, 0, source).samples[0]] == [reward] * 2


def test_a_sample_without_a_token_gets_those_of_its_prompt_and_can_be_trained_around(make):
    args, source = make("bc", custom_generate_function_path=f"{HERE}:lost_before_its_first_token")
    samples = [sample for group in generate_rollout(args, 0, source).samples for sample in group]
    mask_untrusted(args, samples)
    check_trainable(args, "the rollout", samples)
    empty, full = samples[:2]
    assert (len(empty.tokens), empty.response_length) == (len(full.tokens) - 1, 0)
    data = samples_to_train_data(samples, *post_process_rewards(args, samples))
    assert data["loss_masks"] == [[], [1], [], [1, 1]]


def test_a_reward_function_says_that_a_reward_says_nothing(make):
    args, source = make("bc", custom_rm_path=f"{HERE}:reward_says_so")
    groups = generate_rollout(args, 0, source).samples
    assert shown(groups)[1] == [("pc", None, "grader_error", False)] * 2


def test_a_group_that_its_judge_could_not_compare_is_lost(make):
    args, source = make("b", custom_rm_path=f"{HERE}:judges_groups", group_rm=True, rollout_batch_size=1)
    assert shown(generate_rollout(args, 0, source).samples) == [[("pb", None, "grader_error", False)] * 2]
    args, source = make("b", custom_rm_path=f"{HERE}:judges_groups", on_untrusted_reward="keep", group_rm=True)
    with pytest.raises(SampleError, match="a judge failed"):
        generate_rollout(args, 0, source)


def test_a_filter_sees_trusted_rewards_alone(make):
    """Of "pc" one sample is trusted, which has no spread; of a prompt that is lost as a whole no filter is asked."""
    changes = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 2}
    changes |= {"dynamic_sampling_filter_path": f"{HERE}:spread", "max_dynamic_sampling_rounds": 1}
    args, source = make("c", **changes, custom_generate_function_path=f"{HERE}:first_of_c_is_lost")
    with pytest.raises(RuntimeError, match="drop_zero_std_2.0': 1"):
        generate_rollout(args, 0, source)
    args, source = make("c", **changes, custom_generate_function_path=f"{HERE}:always_lost")
    with pytest.raises(RuntimeError, match="drop_untrusted_reward': 1"):
        generate_rollout(args, 0, source)


def test_a_finished_sample_whose_grader_failed_is_graded_in_the_next_rollout(make):
    args, source = make("b", rollout_batch_size=1, partial_rollout=True)
    group = [Sample(prompt="pb", index=i, group_index=0, tokens=[1, 2], response_length=1) for i in range(2)]
    for sample in group:
        sample.status, sample.rollout_log_probs = Status.COMPLETED, [-1.0]
    lost(group[0], "grader_error")
    lost(group[1], "env_error")
    source.get_samples = lambda count: [group]
    assert shown(generate_rollout(args, 0, source).samples) == [
        [("pb", 1.0, "done", True), ("pb", None, "env_error", False)]
    ]


# ---- what the trainer gets


def batch(*, with_lost: bool, fan_out: bool = False) -> list[Sample]:
    """Two groups: rewards 1, 4, 2 and 0, 3; with lost samples among them, whose reward is `POISON` or none."""
    made, rewards = [], {0: [1.0, None, 4.0, 2.0], 1: [0.0, 3.0, POISON], 2: [POISON, None]}
    for group, values in rewards.items():
        for value in values:
            index = len(made)
            length = index % 3 + 2
            one = Sample(group_index=group, index=index, reward=value, tokens=[5] * (3 + length), prompt="p")
            one.response_length, one.status = length, Status.COMPLETED
            one.rollout_log_probs, one.rollout_id = [-1.0] * length, index
            one.metadata["greedy_reward"] = 0.5
            if value in (None, POISON):
                lost(one)
            made.append(one)
    if fan_out:  # of the first execution another sample is lost: the execution is what the trusted one says
        made.append(lost(dataclasses.replace(made[0], reward=POISON, metadata=dict(made[0].metadata))))
    return [sample for sample in made if with_lost or sample.reward_is_trusted]


BASELINES = {
    "grpo": lambda rewards, lengths, i: statistics.fmean(rewards),
    "rloo": lambda rewards, lengths, i: statistics.fmean(rewards[:i] + rewards[i + 1 :]),
    "reinforce_plus_plus_baseline": lambda rewards, lengths, i: statistics.fmean(rewards),
    "opo": lambda rewards, lengths, i: sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths),
    "remax": lambda rewards, lengths, i: 0.5,
    "ppo": lambda rewards, lengths, i: 0.0,
}


@pytest.mark.parametrize("fan_out", [False, True])
@pytest.mark.parametrize("estimator", BASELINES)
def test_rewards_for_training_are_those_of_the_trusted_samples_alone(estimator, fan_out):
    args = rollout_args(advantage_estimator=estimator, grpo_std_normalization=estimator == "grpo")
    samples = batch(with_lost=True, fan_out=fan_out)
    raw, rewards = post_process_rewards(args, samples)
    for group in (0, 1):
        places = [i for i, s in enumerate(samples) if s.group_index == group and s.reward_is_trusted]
        own = [samples[i].reward for i in places]
        scale = statistics.stdev(own) + 1e-6 if estimator == "grpo" else 1.0
        lengths = [samples[i].response_length for i in places]
        expected = [(r - BASELINES[estimator](own, lengths, i)) / scale for i, r in enumerate(own)]
        assert [rewards[i] for i in places] == pytest.approx(expected)
        assert [raw[i] for i in places] == own
    unknown = [i for i, sample in enumerate(samples) if not sample.reward_is_trusted]
    assert all(rewards[i] == 0.0 and raw[i] != raw[i] for i in unknown)


@pytest.mark.parametrize("estimator", [*BASELINES, "reinforce_plus_plus"])
def test_advantages_are_as_if_a_lost_sample_had_never_been(estimator):
    """Whitened over the batch, with a critic's values that are wild where nothing is trained."""
    args = rollout_args(advantage_estimator=estimator, normalize_advantages=True, kl_coef=0.0, use_opd=False)
    found = {}
    for with_lost in (True, False):
        samples = batch(with_lost=with_lost)
        mask_untrusted(args, samples)
        data = samples_to_train_data(samples, *post_process_rewards(args, samples))
        share = {**data, "total_lengths": [len(tokens) for tokens in data["tokens"]]}
        share["loss_masks"] = [torch.tensor(mask) for mask in data["loss_masks"]]
        share["values"] = [torch.full((s.response_length,), 0.25 if s.reward_is_trusted else POISON) for s in samples]
        Advantages.of(args)(share, None)
        found[with_lost] = {
            s.index: advantages.tolist()
            for s, advantages in zip(samples, share["advantages"], strict=True)
            if s.reward_is_trusted
        }
        assert all(
            not mask.any() for s, mask in zip(samples, share["loss_masks"], strict=True) if not s.reward_is_trusted
        )
        assert with_lost is (0 in data["rollout_mask_sums"]), "a lost execution divides nothing"
    assert found[True].keys() == found[False].keys()
    for index, advantages in found[False].items():
        assert found[True][index] == pytest.approx(advantages, abs=1e-6)


def test_keep_trains_on_every_reward_as_it_is():
    args = rollout_args(advantage_estimator="rloo", on_untrusted_reward="keep")
    samples = [sample for sample in batch(with_lost=True) if sample.reward is not None]
    mask_untrusted(args, samples)
    data = samples_to_train_data(samples, *post_process_rewards(args, samples))
    assert data["raw_reward"] == [sample.reward for sample in samples] and all(map(all, data["loss_masks"]))


def test_a_lost_sample_without_experts_leaves_those_of_the_others():
    args, samples = rollout_args(), batch(with_lost=True)
    mask_untrusted(args, samples)
    for sample in samples:
        if sample.reward_is_trusted:
            sample.rollout_routed_experts = np.full((len(sample.tokens) - 1, 3, 2), 5, np.int32)
    data = samples_to_train_data(samples, *post_process_rewards(args, samples))
    for sample, experts in zip(samples, data["rollout_routed_experts"], strict=True):
        assert experts.shape == (len(sample.tokens) - 1, 3, 2) and experts.dtype == np.int32
        assert (experts == (5 if sample.reward_is_trusted else [0, 1])).all(), "a token has two experts"


def test_a_lost_greedy_baseline_is_in_no_mean():
    collector = Collector(rollout_args(), 0)
    known = [Sample(metadata={GREEDY_REWARD: 0.5}, reward=1.0)]
    collector.accepted = [known, [lost(Sample(metadata={GREEDY_REWARD: 0.0}))]]
    assert collector.metrics()["rollout/greedy_reward"] == 0.5


def test_policy_filtration_draws_no_lost_sample():
    args = rollout_args(pf_ppo_reweight="max_min", advantage_estimator="ppo")
    samples = batch(with_lost=True)
    mask_untrusted(args, samples)
    data = samples_to_train_data(samples, *post_process_rewards(args, samples))
    drawn = filter_train_data(args, data, samples)
    assert len(drawn["tokens"]) == len(samples), "batch sizes stay"
    alone = [s.index for s in samples if s.group_index == 2]
    trusted = [s.index for s in samples if s.reward_is_trusted]
    assert set(drawn["sample_indices"]) <= {*trusted, *alone}


def test_a_rollout_without_any_trusted_reward_is_said_aloud(caplog):
    args, samples = rollout_args(), [lost(sample) for sample in batch(with_lost=False)]
    mask_untrusted(args, samples)
    assert "no reward of the 5 samples of this rollout is trusted (env_error 5)" in caplog.text
    assert post_process_rewards(args, samples)[1] == [0.0] * 5


# ---- what is reported


def test_metrics_count_lost_samples_and_leave_their_rewards_out():
    args = rollout_args(n_samples_per_prompt=2, log_passrate=True, log_correct_samples=True)
    samples = [
        Sample(group_index=i // 2, reward=1.0, response_length=2, end_reason="done", status=Status.COMPLETED)
        for i in range(6)
    ]
    samples[1].reward = 0.0
    samples[2].reward = None
    lost(samples[2], "grader_error")
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert metrics["rollout/end_reason/done"] == 5 / 6 and metrics["rollout/end_reason/grader_error"] == 1 / 6
    assert metrics["rollout/untrusted_reward"] == 1 / 6
    assert metrics["passrate/pass@1"] == (1 / 2 + 1) / 2, "the group of the lost sample says nothing"
    assert metrics["rollout/correct_ratio"] == 4 / 5
    assert metrics["rollout/zero_std/fraction"] == 1 / 2, "of the two groups with several trusted samples"


async def grade(args, sample, **kwargs):
    if sample.prompt == "pd" and sample.index % 2 == 0:
        lost(sample, "grader_error")
        return POISON
    return 1.0


def test_an_evaluation_leaves_lost_answers_out_and_counts_them(evaluate):  # noqa: F811
    repeated = {"n_samples_per_eval_prompt": 2}
    args, output = evaluate({"e": ("bdc", repeated)}, custom_rm_path=f"{HERE}:grade", log_passrate=True)
    result = output.data["e"]
    assert result["rewards"] == [1.0] * 5 and len(result["samples"]) == len(result["truncated"]) == 5
    assert [(s.prompt, s.end_reason) for s in result["untrusted"]] == [("pd", "grader_error")]
    vars(args).update(n_samples_per_eval_prompt=2)
    metrics = compute_eval_metrics(args, output.data)
    assert (metrics["eval/e"], metrics["eval/e-untrusted_samples"], metrics["eval/e-pass@2"]) == (1.0, 1.0, 1.0)
    assert metrics["eval/e/end_reason/grader_error"] == 1 / 6
    _, output = evaluate({"e": ("d", {})}, custom_rm_path=f"{HERE}:grade", on_untrusted_reward="keep")
    assert output.data["e"]["rewards"] == [POISON]


def test_remax_masks_a_group_whose_greedy_answer_was_lost(make):
    changes = {"advantage_estimator": "remax", "rollout_batch_size": 1, "over_sampling_batch_size": 1}
    args, source = make("b", **changes, custom_generate_function_path=f"{HERE}:greedy_is_lost")
    [group] = generate_rollout(args, 0, source).samples
    assert [s.reward_is_trusted for s in group] == [False] * 2 and json.dumps(group[0].metadata)


async def greedy_is_lost(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return lost(sample) if sampling_params["temperature"] == 0 else sample


def test_a_fan_out_execution_keeps_its_trusted_samples(make):
    args, source = make("bc", custom_generate_function_path=f"{HERE}:lost_siblings")
    groups = generate_rollout(args, 0, source).samples
    assert [[s.reward_is_trusted for s in group] for group in groups] == [[True, False] * 2] * 2
    assert GenerateState(args).pendings == {}
