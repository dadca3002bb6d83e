"""Functions that can be called, and return what cannot be used. NUMBER is no function."""

from __future__ import annotations

from user_package.hooks import Numbers, complete, completed_groups

NUMBER = 3


def rollout_none(args, rollout_id, data_source, evaluation=False):
    return None


def rollout_dict(args, rollout_id, data_source, evaluation=False):
    return {"samples": []}


def rollout_texts(args, rollout_id, data_source, evaluation=False):
    return [["text"]]


def rollout_nothing(args, rollout_id, data_source, evaluation=False):
    return []


def rollout_twice(args, rollout_id, data_source, evaluation=False):
    groups = completed_groups(args, data_source)
    return [[group[0]] * len(group) for group in groups]


def rollout_null_log_prob(args, rollout_id, data_source, evaluation=False):
    groups = completed_groups(args, data_source)
    groups[0][1].rollout_log_probs = [None] * groups[0][1].response_length
    return groups


def rollout_images(args, rollout_id, data_source, evaluation=False):
    groups = completed_groups(args, data_source)
    groups[0][0].multimodal_train_inputs = {"pixel_values": [1.0]}
    return groups


def rollout_nan_reward(args, rollout_id, data_source, evaluation=False):
    groups = completed_groups(args, data_source)
    groups[0][0].reward = float("nan")
    return groups


def eval_list(args, rollout_id, data_source, evaluation=False):
    return completed_groups(args, data_source)


def eval_without_rewards(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"samples": []}}


async def generate_none(args, sample, sampling_params):
    complete(sample)


async def generate_text(args, sample, sampling_params):
    return "text"


async def generate_no_sample(args, sample, sampling_params):
    return []


async def generate_short_mask(args, sample, sampling_params):
    complete(sample).loss_mask = [1]
    return sample


async def generate_negative_token(args, sample, sampling_params):
    complete(sample).tokens[-1] = -1
    return sample


async def generate_two_executions(args, sample, sampling_params):
    siblings = [complete(type(sample)(prompt=sample.prompt)) for _ in range(2)]
    siblings[0].rollout_id, siblings[1].rollout_id = 1, 2
    return siblings


async def generate_error(args, sample, sampling_params):
    raise KeyError("search")


def generate_without_async(args, sample, sampling_params):
    return complete(sample)


def hook_text(args, sample):
    return "text"


def hook_list(args, sample):
    return [sample]


async def reward_none(args, sample, **kwargs):
    return None


async def reward_text(args, sample, **kwargs):
    return "good"


async def reward_nan(args, sample, **kwargs):
    return float("nan")


async def reward_dict(args, sample, **kwargs):
    return {"points": 1.0}


async def rewards_number(args, samples, **kwargs):
    return 1.0


async def rewards_short(args, samples, **kwargs):
    return [1.0]


def filter_none(args, group):
    pass


def filter_tuple(args, group):
    return True, "because"


def buffer_none(args, rollout_id, buffer, num_samples):
    del buffer[:num_samples]


def buffer_kept(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def buffer_all(args, rollout_id, buffer, num_samples):
    groups = list(buffer)
    buffer.clear()
    return groups


def buffer_samples(args, rollout_id, buffer, num_samples):
    return buffer.pop()


def filter_that_returns(args, data):
    return data[:1]


def post_one_list(args, samples):
    return [sample.reward for sample in samples]


def post_nan_teacher(args, samples):
    for sample in samples:
        sample.teacher_log_probs = [float("nan")] * sample.response_length
    return [0.0] * len(samples), [0.0] * len(samples)


def post_none(args, samples):
    return None


def post_short(args, samples):
    return [1.0], [1.0]


def post_none_inside(args, samples):
    rewards = [sample.reward for sample in samples]
    return rewards, [None, *rewards[1:]]


def log_text(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return {"mine/x": "high"}


def convert_none(args, samples):
    return None


def convert_few_columns(args, samples):
    return {"tokens": [], "response_lengths": [], "rewards": []}


def convert_uneven(args, samples):
    from user_package.hooks import convert

    return {**convert(args, samples), "loss_masks": [[1]]}


def convert_mask(args, samples):
    from user_package.hooks import convert

    columns = convert(args, samples)
    return {**columns, "loss_masks": [[7] * length for length in columns["response_lengths"]]}


class GivesOneTwice(Numbers):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        return [[group[0]] * len(group) for group in groups]


class GivesNothing(Numbers):
    def get_samples(self, num_samples):
        return []


class GivesSamples(Numbers):
    def get_samples(self, num_samples):
        return super().get_samples(num_samples)[0]


class GivesNone(Numbers):
    def get_samples(self, num_samples):
        return None


class OnlyGives:
    def __init__(self, args):
        pass

    def get_samples(self, num_samples):
        return []


def make_nothing(args):
    return None


def exits(*args, **kwargs):
    raise SystemExit(3)


def divides_by_zero(*args, **kwargs):
    return 1 / 0
