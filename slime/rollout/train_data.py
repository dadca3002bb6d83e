"""From scored samples to TrainData: columns, loss masks and the denominators of the per-rollout mean.

Optional columns are decided by all samples, not by the first. It does not split data over ranks (slime.ray) or make
tensors (slime.training.micro_batches).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.utils.data import get_source
from slime.utils.train_data import TrainData
from slime.utils.types import Sample


def samples_to_train_data(
    samples: Sequence[Sample], raw_rewards: Sequence[float], rewards: Sequence[float]
) -> TrainData:
    """The default conversion.

    Args:
        samples: S samples with tokens.
        raw_rewards: [S]; a sample's metadata["raw_reward"] replaces its entry.
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
        "raw_reward": [float(s.metadata.get("raw_reward", raw)) for s, raw in zip(samples, raw_rewards, strict=True)],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [i if sample.index is None else sample.index for i, sample in enumerate(samples)],
        "rollout_ids": rollout_ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": mask_sums(rollout_ids, loss_masks),
    }
    _add_optional_columns(data, samples)
    return data


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


def mask_sums(rollout_ids: Sequence[int], loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """[S] trained tokens of each sample's whole execution."""
    total: dict[int, int] = defaultdict(int)
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        total[rollout_id] += int(sum(mask))
    return [total[rollout_id] for rollout_id in rollout_ids]


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
        data["rollout_routed_experts"] = [_routed_experts(sample) for sample in samples]
    if any("round_number" in sample.metadata for sample in samples):
        data["round_number"] = [int(sample.metadata.get("round_number", 1)) for sample in samples]
    if any(sample.train_metadata is not None for sample in samples):
        data["metadata"] = [sample.train_metadata for sample in samples]
    sources = [get_source(sample) for sample in samples]
    if any(source != "unknown" for source in sources):
        data["source_names"] = sources


def _routed_experts(sample: Sample) -> Any:
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
    is_number = np.isfinite(np.asarray(log_probs, float))  # None is not; slime.rollout.sample_errors: it is masked
    if is_number.all():
        return log_probs
    return [value if usable else 0.0 for value, usable in zip(log_probs, is_number, strict=True)]
