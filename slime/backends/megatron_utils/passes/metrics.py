"""What the trainer says about a rollout besides its losses: means of the data's columns, and where the time went.

It returns plain dicts; it knows nothing about sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.data import MicroBatches
from slime.backends.megatron_utils.loss import all_reduce_sum
from slime.config.args import Args
from slime.utils.flops_utils import calculate_fwd_flops, calculate_prediction_flops, calculate_train_flops

NOT_LOGGED = ("tokens", "loss_masks", "sample_indices", "rollout_ids", "rollout_mask_sums")
FORWARD_PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs")


def column_means(micro_batches: MicroBatches, group: dist.ProcessGroup) -> dict[str, float]:
    """Mean over all ranks' samples of each column with numbers: `rollout/<column>`.

    A column of per-token tensors counts by each sample's mean over its trained tokens. A column that is not one value
    per sample, or holds no numbers, is left out; so is `kl` where there is no reference to measure it from.
    """
    data = micro_batches.rollout_data
    mean_of_tokens = get_sum_of_sample_mean(data["total_lengths"], data["response_lengths"], data["loss_masks"])
    sums: dict[str, torch.Tensor] = {}
    for name in sorted(micro_batches.columns()):
        if name in NOT_LOGGED or (name == "kl" and not {"log_probs", "ref_log_probs"} <= data.keys()):
            continue
        if (total := _column_sum(micro_batches.column(name), data["response_lengths"], mean_of_tokens)) is not None:
            sums[name] = total
    device = data["tokens"][0].device
    count = torch.tensor(float(micro_batches.num_samples))
    packed = torch.stack([value.double().to(device) for value in (count, *sums.values())])
    num_samples, *totals = all_reduce_sum(packed, group)
    return {f"rollout/{name}": total / num_samples for name, total in zip(sums, totals, strict=True)}


def _column_sum(column: Sequence[Any], response_lengths: Sequence[int], mean_of_tokens: Any) -> torch.Tensor | None:
    if all(isinstance(value, torch.Tensor) for value in column):
        per_token = all(value.shape == (length,) for value, length in zip(column, response_lengths, strict=True))
        return mean_of_tokens(torch.cat(list(column)).float()) if per_token else None
    if all(isinstance(value, int | float) for value in column):
        return torch.tensor(column, dtype=torch.float64).sum()
    return None


def perf_metrics(
    args: Args, seconds: Mapping[str, float], seqlens: Sequence[int], response_lengths: Sequence[int]
) -> dict[str, float]:
    """Times and rates of one rollout's training on this rank.

    Rates are of one device, with the FLOPs of `slime.utils.flops_utils`; a pass of training costs three forward
    passes, and --ppo-epochs says how often the rollout was trained on.

    Args:
        args: the model's sizes, those over which one copy of it is spread, `enable_mtp_training` and `ppo_epochs`.
        seconds: seconds of each timer; `actor_train`, `train` and `train_wait` and the forward passes are known here.
        seqlens: tokens of each sample that this rank trained on.
        response_lengths: those of them that are its response's.

    Returns:
        `perf/<timer>_time`, `perf/<pass>_tflops`, `perf/actor_train_tok_per_s` (of this rank's data, which the devices
        of one copy of the model train together), `perf/actor_train_tok_per_gpu_per_sec`, `perf/step_time` (from the
        end of one training to the end of the next) and the share of it spent waiting.
    """
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    devices = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    forward_tflops = calculate_fwd_flops(seqlens, args) / devices / 1e12
    for name in FORWARD_PASSES:
        if seconds.get(name):
            metrics[f"perf/{name}_tflops"] = forward_tflops / seconds[name]
    if training_s := seconds.get("actor_train"):
        tokens_per_s = args.ppo_epochs * sum(seqlens) / training_s
        tflops = calculate_train_flops(seqlens, args) / devices / 1e12
        if args.enable_mtp_training:
            tflops += calculate_prediction_flops(seqlens, sum(response_lengths), args) / devices / 1e12
        metrics["perf/actor_train_tflops"] = args.ppo_epochs * tflops / training_s
        metrics["perf/actor_train_tok_per_s"] = tokens_per_s
        metrics["perf/actor_train_tok_per_gpu_per_sec"] = tokens_per_s / devices
    waited, trained = seconds.get("train_wait", 0.0), seconds.get("train", 0.0)
    metrics["perf/step_time"] = waited + trained
    metrics["perf/wait_time_ratio"] = waited / (waited + trained) if waited + trained else 0.0
    return metrics
