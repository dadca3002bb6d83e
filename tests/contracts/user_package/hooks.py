"""One function for each hook of a rollout; `calls` has what they were called with."""

from __future__ import annotations

import asyncio
import copy

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample
from user_package.calls import recorded

FIRST_TOKEN = 500


def complete(sample, num_tokens=2):
    """A response of `num_tokens` tokens, as any engine might have written it."""
    prompt = [ord(letter) for letter in sample.prompt]
    sample.tokens = prompt + [FIRST_TOKEN + i for i in range(num_tokens)]
    sample.response, sample.response_length = "y" * num_tokens, num_tokens
    sample.rollout_log_probs = [-1.0] * num_tokens
    sample.status = Sample.Status.COMPLETED
    return sample


def completed_groups(args, data_source):
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for position, sample in enumerate(group):
            complete(sample).reward = float(position)
    return groups


# 1 and 2: whole rollouts


@recorded
def rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        data = {"mine": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": []}}
        return RolloutFnEvalOutput(data=data, metrics={"eval/note": 5.0})
    return RolloutFnTrainOutput(samples=completed_groups(args, data_source), metrics={"rollout/note": 4.0})


@recorded
def legacy_groups(args, rollout_id, data_source, evaluation=False):
    return completed_groups(args, data_source)


@recorded
def legacy_samples(args, rollout_id, data_source, evaluation=False):
    return [sample for group in completed_groups(args, data_source) for sample in group]


@recorded
def legacy_three_levels(args, rollout_id, data_source, evaluation=False):
    groups = completed_groups(args, data_source)
    for group in groups:
        for sample in group:
            sample.rollout_id = sample.index
    return [[[sample, copy.deepcopy(sample)] for sample in group] for group in groups]


@recorded
def legacy_evaluation(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"rewards": [1.0, 0.0], "truncated": [False, True]}}


# 3: a generate function


@recorded
async def generate(args, sample, sampling_params):
    return complete(sample)


@recorded
async def generate_and_tell(args, sample, sampling_params, evaluation=False):
    return complete(sample, num_tokens=3 if evaluation else 1)


@recorded
async def generate_with_reward(args, sample, sampling_params):
    complete(sample).reward = 0.25
    return sample


@recorded
async def generate_two(args, sample, sampling_params):
    """Fan-out: the sample and a sibling of another length; the rollout_id is slime's to give."""
    return [complete(copy.deepcopy(sample), 1), complete(copy.deepcopy(sample), 2)]


@recorded
async def generate_two_one_scored(args, sample, sampling_params):
    """Fan-out whose first sample brings its reward."""
    first, second = complete(copy.deepcopy(sample), 1), complete(copy.deepcopy(sample), 2)
    first.reward = 0.5
    return [first, second]


class Traffic:
    now = most = 0


@recorded
async def generate_slowly(args, sample, sampling_params):
    Traffic.now += 1
    Traffic.most = max(Traffic.most, Traffic.now)
    await asyncio.sleep(0.01)
    Traffic.now -= 1
    return complete(sample)


# 4: sample hooks


@recorded
def mark(args, sample):
    sample.metadata["marks"] = [*sample.metadata.get("marks", []), "mark"]


@recorded
async def mark_later(args, sample, rollout_id, evaluation):
    await asyncio.sleep(0)
    sample.metadata["marks"] = [*sample.metadata.get("marks", []), f"later {rollout_id} {evaluation}"]


@recorded
def replace(args, sample, **offered):
    other = copy.deepcopy(sample)
    other.metadata["replaced"] = True
    return other


# 5: rewards


@recorded
def rate_tokens(args, sample):
    return [float(place) for place in range(sample.response_length)]


@recorded
async def reward(args, sample, **kwargs):
    return float(sample.response_length)


@recorded
def reward_without_async(args, sample, **kwargs):
    return float(sample.response_length)


@recorded
async def reward_group(args, samples, **kwargs):
    return [10.0 + position for position, _ in enumerate(samples)]


@recorded
async def reward_dict(args, sample, **kwargs):
    return {"score": float(sample.response_length), "kind": "length"}


# 6 to 9: filters, and the end of a rollout


@recorded
def keep_even(args, group):
    return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd")


@recorded
def keep_even_as_bool(args, group):
    return group[0].group_index % 2 == 0


@recorded
def pop_last(args, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


@recorded
def remove_first(args, data):
    for group in data:
        group[0].remove_sample = True


@recorded
def see_all(args, all_samples, data_source):
    return "whatever"


@recorded
def see_all_and_draw(args, all_samples, data_source):
    all_samples[0][0].metadata["drawn"] = [group[0].prompt for group in data_source(1)]


# 15 to 18: what becomes of the samples


@recorded
def count_keys(args, samples):
    return [0.0 for _ in samples], [float(len(sample.reward)) for sample in samples]


@recorded
def double_rewards(args, samples):
    return [sample.reward for sample in samples], [2 * sample.reward for sample in samples]


@recorded
def convert(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [7.0] * len(samples),
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [0] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.index for sample in samples],
        "loss_masks": [[1] * sample.response_length for sample in samples],
        "my_column": [sample.index * 10 for sample in samples],
    }


@recorded
def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return True


@recorded
def log_too(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return None


@recorded
def log_more(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["mine/put"] = 1.5
    return {"mine/returned": 2.5}


@recorded
def log_eval(rollout_id, args, data, extra_metrics):
    return True


@recorded
def log_eval_more(rollout_id, args, data, extra_metrics):
    extra_metrics["mine/put"] = 1.5
    return {"mine/returned": 2.5}


@recorded
def log_eval_too(rollout_id, args, data, extra_metrics):
    return False


# 19: a data source of its own, and one that gives each sample functions of its own


class Numbers:
    """Counts; its prompts are "p" and a letter."""

    @recorded
    def __init__(self, args):
        self.args, self.given, self.returned = args, 0, []

    @recorded
    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            prompt, each = "p" + "bcde"[self.given % 4], self.args.n_samples_per_prompt
            first = self.given * each
            groups.append(
                [Sample(prompt=prompt, group_index=self.given, index=first + i) for i in range(each)],
            )
            self.given += 1
        return groups

    @recorded
    def add_samples(self, samples):
        self.returned += samples

    @recorded
    def save(self, rollout_id):
        return None

    @recorded
    def load(self, rollout_id=None):
        return None

    def __len__(self):
        return 4


class WithFunctions(RolloutDataSourceWithBuffer):
    """Every second sample brings its own generate and reward function."""

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            group[1].generate_function_path = self.args.functions["generate"]
            group[1].custom_rm_path = self.args.functions["reward"]
        return groups
