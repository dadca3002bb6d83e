"""From scored samples to TrainData: rewards without the baseline of their group, columns, loss masks and the
denominators of the per-rollout mean.

Optional columns are decided by all samples, not by the first. It does not split data over ranks (slime.ray) or make
tensors (slime.training.micro_batches).

Which baseline is subtracted is the estimator's (slime.algorithms.estimators). Departs from upstream in three points:
groups are always those of `group_index` (never guessed from counts), a fan-out rollout (several samples that share a
`rollout_id`) counts once in its group's mean and deviation, and with --overlong-buffer-len a penalty for long
responses is added first.

A sample whose reward is not trusted stays in the batch with a mask of zeros (--on-untrusted-reward): it is in no mean,
deviation or draw, its reward is 0, and its raw reward is NaN, which the trainer leaves out of the metric.

Policy filtration (PF-PPO, Shen and Zhang 2024, arXiv 2409.06957) trains on responses drawn again by reward, so that
unreliable middling rewards count less. After advantages are made from all responses, as many executions as a group has
are drawn from it with replacement, so that batch sizes stay.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.algorithms.estimators import BASELINES, ESTIMATORS, GREEDY_REWARD, Baseline, group_mean, overlong_penalties
from slime.config.args import Args
from slime.plugins import function_of
from slime.rollout.hooks.errors import blame_hook, hook_name
from slime.rollout.hooks.returns import check_rewards
from slime.utils.data import get_source
from slime.utils.misc import group_by, hook_args, is_finite_number, load_function, needed, shown
from slime.utils.train_data import TrainData, mask_sums
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def samples_to_train_data(
    samples: Sequence[Sample], raw_rewards: Sequence[float], rewards: Sequence[float]
) -> TrainData:
    """The default conversion.

    Args:
        samples: S samples with tokens.
        raw_rewards: [S]; a sample's metadata["raw_reward"] replaces its entry. NaN is no reward.
        rewards: [S] after normalisation.

    Raises:
        ValueError: a loss mask or log-prob list of another length than the response, or rollout log-probs on some
            trained samples only.
    """
    loss_masks = [response_loss_mask(sample) for sample in samples]
    rollout_ids = fill_rollout_ids([sample.rollout_id for sample in samples])
    data: TrainData = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [float(reward) for reward in rewards],
        "raw_reward": [
            raw if math.isnan(raw) else float(sample.metadata.get("raw_reward", raw))
            for sample, raw in zip(samples, raw_rewards, strict=True)
        ],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [i if sample.index is None else sample.index for i, sample in enumerate(samples)],
        "rollout_ids": rollout_ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": mask_sums(rollout_ids, loss_masks),
    }
    _add_optional_columns(data, samples)
    return data


def mask_untrusted(args: Args, samples: Sequence[Sample]) -> None:
    """Take samples whose reward says nothing out of the loss (--on-untrusted-reward): they are removed samples."""
    unknown = [sample for sample in samples if not sample.counts(args)]
    for sample in unknown:
        sample.remove_sample = True
    if samples and len(unknown) == len(samples):
        reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(s.end_reason for s in unknown).items())
        logger.error(
            "no reward of the %d samples of this rollout is trusted (%s), so nothing of it is trained on; see the "
            "warnings above, and --on-untrusted-reward",
            *(len(samples), reasons),
        )


def response_loss_mask(sample: Sample) -> list[int]:
    """[R] the sample's mask: all ones by default, all zeros for a removed sample.

    Raises:
        ValueError: it is not as long as the response, or the response is longer than the tokens.
    """
    if sample.response_length > len(sample.tokens):
        raise ValueError(
            f"sample {sample.index} has {len(sample.tokens)} tokens but a response_length of {sample.response_length}"
        )
    mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    if len(mask) != sample.response_length:
        raise ValueError(
            f"sample {sample.index} has a loss_mask of {len(mask)} for {sample.response_length} response tokens"
        )
    return [0] * len(mask) if sample.remove_sample else mask


def fill_rollout_ids(rollout_ids: Sequence[int | None]) -> list[int]:
    """Give each sample without a rollout id the smallest unused non-negative one."""
    used = {rollout_id for rollout_id in rollout_ids if rollout_id is not None}
    unused = (candidate for candidate in itertools.count() if candidate not in used)
    return [next(unused) if rollout_id is None else rollout_id for rollout_id in rollout_ids]


def _add_optional_columns(data: TrainData, samples: Sequence[Sample]) -> None:
    if any(sample.rollout_log_probs is not None for sample in samples):
        data["rollout_log_probs"] = [
            _log_probs(sample, mask, "rollout_log_probs")
            for sample, mask in zip(samples, data["loss_masks"], strict=True)
        ]
    if any(sample.teacher_log_probs is not None for sample in samples):
        data["teacher_log_probs"] = [
            _log_probs(sample, mask, "teacher_log_probs")
            for sample, mask in zip(samples, data["loss_masks"], strict=True)
        ]
    if any(sample.rollout_routed_experts is not None for sample in samples):
        like = next(found for sample in samples if (found := sample.rollout_routed_experts) is not None)
        data["rollout_routed_experts"] = [
            _routed_experts(sample, mask, like) for sample, mask in zip(samples, data["loss_masks"], strict=True)
        ]
    if any("round_number" in sample.metadata for sample in samples):
        data["round_number"] = [int(sample.metadata.get("round_number", 1)) for sample in samples]
    if any(sample.train_metadata is not None for sample in samples):
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.image_spans for sample in samples):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
        data["image_spans"] = [sample.image_spans or [] for sample in samples]
    sources = [get_source(sample) for sample in samples]
    if any(source != "unknown" for source in sources):
        data["source_names"] = sources


def _routed_experts(sample: Sample, mask: list[int], like: Any) -> Any:
    if sample.rollout_routed_experts is None and not any(mask):  # its environment failed before the engine was asked
        like = np.asarray(like)
        return np.tile(np.arange(like.shape[2], dtype=like.dtype), (len(sample.tokens) - 1, like.shape[1], 1))
    if sample.rollout_routed_experts is None:
        raise ValueError(
            f"sample {sample.index} has no rollout_routed_experts, but other samples of this rollout do; custom code "
            "must append what the engine answers (Sample.append_response_tokens with meta_info), or leave "
            "--use-rollout-routing-replay out"
        )
    return sample.rollout_routed_experts


def _log_probs(sample: Sample, mask: list[int], field: str) -> list[float]:
    log_probs = vars(sample)[field]
    if log_probs is None:
        if any(mask):
            raise ValueError(
                f"sample {sample.index} has no {field}, but other samples of this rollout do; custom code "
                "must set them on every sample that is trained, or on none"
            )
        return [0.0] * len(mask)  # neutral: nothing of this sample is trained
    if len(log_probs) != len(mask):
        raise ValueError(f"sample {sample.index} has {len(log_probs)} {field} for {len(mask)} tokens")
    is_number = np.isfinite(np.asarray(log_probs, float))  # None is not; hooks.sample_errors: it is masked
    if is_number.all():
        return log_probs
    return [value if usable else 0.0 for value, usable in zip(log_probs, is_number, strict=True)]


_STD_EPSILON = 1e-6


def post_process_rewards(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards for training) of a flat list of samples; a custom post-process replaces the default.

    Only samples whose reward counts are looked at, also by a custom post-process; the others get NaN and 0.

    Args:
        args: reads `custom_reward_post_process_path`, `reward_key`, `advantage_estimator`, `rewards_normalization`,
            `grpo_std_normalization`, `overlong_buffer_len`, `overlong_penalty_factor`, `rollout_max_response_len`,
            `on_untrusted_reward`.
        samples: every sample of the rollout, scored.

    Raises:
        ValueError: a sample has no reward.
        HookReturnError: the custom function returned no pair of lists of numbers.
    """
    places = [i for i, sample in enumerate(samples) if sample.counts(args)]
    raw, rewards = [math.nan] * len(samples), [0.0] * len(samples)
    if places:
        known = _post_process_known(args, [samples[i] for i in places])
        for i, raw_value, value in zip(places, *known, strict=True):
            raw[i], rewards[i] = raw_value, value
    return raw, rewards


def _post_process_known(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    if args.custom_reward_post_process_path:
        path = args.custom_reward_post_process_path
        with blame_hook(f"--custom-reward-post-process-path {hook_name(path)}"):
            returned = load_function(path)(hook_args(args), samples)
        return check_rewards(path, returned, len(samples))
    raw = [raw_reward(args, sample) for sample in samples]
    rewards = [reward + penalty for reward, penalty in zip(raw, overlong_penalties(args, samples), strict=True)]
    estimator = ESTIMATORS[args.advantage_estimator]
    if not args.rewards_normalization or estimator.baseline is None:
        return raw, rewards
    if estimator.baseline == "greedy":
        return raw, [reward - _greedy_reward(sample) for sample, reward in zip(samples, rewards, strict=True)]
    divide = estimator.divides_by_std and args.grpo_std_normalization
    baseline_fn = function_of(BASELINES, estimator.baseline)
    return raw, normalize_by_group(samples, rewards, divide_by_std=divide, baseline_fn=baseline_fn)


def _greedy_reward(sample: Sample) -> float:
    if GREEDY_REWARD not in sample.metadata:
        raise ValueError(
            f"sample {sample.index} has no metadata[{GREEDY_REWARD!r}], which --advantage-estimator remax subtracts; "
            "slime's own rollout functions put it there, another --rollout-function-path has to"
        )
    return float(sample.metadata[GREEDY_REWARD])


def raw_reward(args: Args, sample: Sample) -> float:
    """A sample's reward as a number.

    Raises:
        ValueError: it has none, or a dict without --reward-key, or something else that is no finite number.
    """
    value = sample.get_reward_value(args)
    if not is_finite_number(value):
        found = "no reward" if value is None else f"the reward {shown(value)}"
        remedy = "; name its number with --reward-key" if isinstance(value, dict) else ""
        raise ValueError(f"sample {sample.index} (status {sample.status.value}) has {found}{remedy}")
    return float(value)


def normalize_by_group(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    *,
    divide_by_std: bool,
    baseline_fn: Baseline = group_mean,
) -> list[float]:
    """Rewards minus their group's baseline and, if asked, divided by its deviation (unbiased) + 1e-6.

    A group of one execution becomes 0. A sample without a `group_index` is a group of its own.

    Args:
        samples: their `group_index`, `rollout_id` and trained tokens are read.
        rewards: [S].
        divide_by_std: also divide.
        baseline_fn: (rewards, trained tokens) of a group's executions -> the baseline of each.
    """
    normalized = [0.0] * len(samples)
    positions = range(len(samples))

    def group_of(i: int) -> tuple[str, int]:
        index = samples[i].group_index
        return ("group", index) if index is not None else ("alone", i)

    def execution_of(i: int) -> tuple[str, int]:
        rollout_id = samples[i].rollout_id
        return ("rollout", rollout_id) if rollout_id is not None else ("sample", i)

    for members in group_by(positions, group_of).values():
        executions = list(group_by(members, execution_of).values())
        values = [math.fsum(rewards[i] for i in execution) / len(execution) for execution in executions]
        lengths = [sum(samples[i].effective_response_length for i in execution) for execution in executions]
        scale = _unbiased_std(values) + _STD_EPSILON if divide_by_std else 1.0
        for execution, baseline in zip(executions, baseline_fn(values, lengths), strict=True):
            for i in execution:
                normalized[i] = (rewards[i] - baseline) / scale
    return normalized


def _unbiased_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


MAX_RANDOM_WEIGHT = 0.4
"""Weight of a response that is not the best, for max_random."""


def filtration_weights(rewards: Sequence[float], kind: str, weight_pow: float) -> list[float]:
    """How likely each response of a group is drawn, not normalised.

    pow: |r|^weight_pow; max_min: 1 for the best and the worst, 0 for the rest; max_random: 1 for the best, 0.4 for the
    rest. All equal where every weight would be 0.

    Example:
        >>> filtration_weights([0.0, 2.0, -3.0], "pow", 2.0)
        [0.0, 4.0, 9.0]
    """
    best, worst = max(rewards), min(rewards)
    if kind == "pow":
        largest = max(abs(reward) for reward in rewards)
        weights = [abs(reward) ** weight_pow if largest else 0.0 for reward in rewards]
    elif kind == "max_min":
        weights = [float(reward in (best, worst)) for reward in rewards]
    else:
        weights = [1.0 if reward == best else MAX_RANDOM_WEIGHT for reward in rewards]
    return weights if any(weights) else [1.0] * len(weights)


def filter_train_data(args: Args, data: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns of the executions that were drawn; each draw is a rollout of its own.

    Args:
        args: `pf_ppo_reweight`, `pf_ppo_weight_pow`, `rollout_seed`, from which the draws follow.
        data: TrainData of `samples`, with `raw_reward` and `rollout_ids`.
        samples: their `group_index` is read; a sample without one stays.
    """
    draws = random.Random(f"{args.rollout_seed} {data['sample_indices']}")
    owners = [("alone", i) if s.group_index is None else ("group", s.group_index) for i, s in enumerate(samples)]
    picked: list[list[int]] = []
    for members in group_by(range(len(samples)), lambda i: owners[i]).values():
        executions = list(group_by(members, lambda i: data["rollout_ids"][i]).values())
        scores = [[data["raw_reward"][i] for i in one if not math.isnan(data["raw_reward"][i])] for one in executions]
        known = [number for number, values in enumerate(scores) if values]
        if not known:  # nothing of the group is trained on; the batch keeps its size
            picked += executions
            continue
        rewards = [sum(scores[number]) / len(scores[number]) for number in known]
        weights = filtration_weights(rewards, needed(args.pf_ppo_reweight), args.pf_ppo_weight_pow)
        picked += draws.choices([executions[number] for number in known], weights, k=len(executions))
    order = [i for execution in picked for i in execution]
    columns = {
        name: [values[i] for i in order] if isinstance(values, list) and len(values) == len(samples) else values
        for name, values in data.items()
    }
    columns["rollout_ids"] = [number for number, execution in enumerate(picked) for _ in execution]
    return columns
