"""What a rank reports of a rollout: metrics of its train steps, means of its columns, times, and the data as a file.

The file (--save-debug-train-data) is what each rank trained on and computed; tools/inspect_dump.py reads it:

    {"format_version": 2, "rollout_id", "rank",
     "samples": [{"data_parallel_rank", "sample_index", "rollout_position", <one entry of every column>}],
     "dp_shards": [{"rank", "data_parallel_rank", "sample_indices", "partition", "micro_batch_indices",
                    "num_microbatches", "global_batch_sizes"}],
     "raw_reward": [...]}

`samples` and `raw_reward` are in the order of the rollout, `rollout_position` is the place in it. Columns are named as
everywhere (slime.utils.train_data), so `log_probs` are the trainer's before the update.

The record (--keep-rollouts), such as 00012.train.rank0.parquet, is written by each data-parallel rank for its own
share, so no rank waits for another; readers join the files by sample. A column that no pass of the rollout has made is
null: nothing is computed for the record alone. The loss's first pass gives log-probs and entropy where no pass does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from slime.algorithms.losses import token_weights, weighted_sum
from slime.checkpoints.rollout_files import DIRECTORY, KeepRule, save_dump, trainer_path, write_tables
from slime.config.args import Args
from slime.observability.rollout_records.recorder import RecordWriter, index_of
from slime.observability.rollout_records.schema import PER_TOKEN, PLAIN_TRAINER, TRAINER
from slime.training.micro_batches import SCHEDULE_KEYS, MicroBatches
from slime.utils.accelerator import gpu_name
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.flops_utils import calculate_fwd_flops, calculate_prediction_flops, calculate_train_flops, peak_tflops

logger = logging.getLogger(__name__)

REWARDS = ("raw_reward", "rewards")
NOT_LOGGED = ("tokens", "loss_masks", "sample_indices", "rollout_ids", "rollout_mask_sums")
FORWARD_PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs")
FORMAT_VERSION = 2
WRITER = 0
"""The rank that gathers the shares and writes the file."""


# ---- from the sums of micro-batches to the metrics of a train step


def pack_report(metrics: Mapping[str, Any], num_tokens: torch.Tensor) -> dict[str, Any]:
    """Return what a micro-batch hands to `reduce_reports`.

    Args:
        metrics: sums over the micro-batch, by name.
        num_tokens: trained tokens of it, a scalar.

    Returns:
        {"keys": the metrics' names, "values": float32 [1 + metrics], the tokens first}.
    """
    values = [num_tokens, *metrics.values()]
    flat = [torch.as_tensor(value, dtype=torch.float32, device=num_tokens.device).detach() for value in values]
    return {"keys": list(metrics), "values": torch.stack(flat)}


def reduce_reports(
    reports: Sequence[Mapping[str, Any]], denominator: float | None, group: dist.ProcessGroup
) -> dict[str, float]:
    """Sum over micro-batches and ranks, divided by `denominator` (None: by the trained tokens of all of them).

    One collective and one copy to the host for all metrics together.
    """
    keys = reports[0]["keys"]
    total = torch.stack([report["values"] for report in reports]).double().sum(dim=0)
    num_tokens, *sums = _all_reduce_sum(total, group)
    by = denominator if denominator is not None else max(num_tokens, 1.0)
    return {key: value / by for key, value in zip(keys, sums, strict=True)}


def _all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup) -> list[float]:
    """`values` [n] summed over the group's ranks, on the host."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values.tolist()


# ---- metrics of a rollout


def column_means(micro_batches: MicroBatches, group: dist.ProcessGroup) -> dict[str, float]:
    """Mean over all ranks' samples of each column with numbers: `rollout/<column>`.

    A column of per-token tensors counts by each sample's mean over its trained tokens. A column that is not one value
    per sample, or holds no numbers, is left out; so is `kl` where there is no reference to measure it from. Means of
    rewards are over the samples that have one (a raw reward that is NaN is not trusted).
    """
    data = micro_batches.rollout_data
    weights = token_weights(data["total_lengths"], data["response_lengths"], data["loss_masks"])
    sums: dict[str, torch.Tensor] = {}
    num_rewards = micro_batches.num_samples
    for name in sorted(micro_batches.columns()):
        if name in NOT_LOGGED or (name == "kl" and not {"log_probs", "ref_log_probs"} <= data.keys()):
            continue
        column = micro_batches.column(name)
        if name == "raw_reward":
            num_rewards = sum(reward == reward for reward in column)
            column = [reward if reward == reward else 0.0 for reward in column]
        if (total := _column_sum(column, data["response_lengths"], weights)) is not None:
            sums[name] = total
    device = data["tokens"][0].device
    counts = torch.tensor([float(micro_batches.num_samples), float(num_rewards)])
    packed = torch.stack([value.double().to(device) for value in (*counts, *sums.values())])
    of_all, of_rewarded, *totals = _all_reduce_sum(packed, group)
    by = {name: of_rewarded if name in REWARDS else of_all for name in sums}
    return {f"rollout/{name}": total / by[name] for name, total in zip(sums, totals, strict=True) if by[name]}


def _column_sum(column: Sequence[Any], response_lengths: Sequence[int], weights: torch.Tensor) -> torch.Tensor | None:
    if all(isinstance(value, torch.Tensor) for value in column):
        per_token = all(value.shape == (length,) for value, length in zip(column, response_lengths, strict=True))
        return weighted_sum(weights, torch.cat(list(column)).float()) if per_token else None
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
        `perf/<timer>_time`, `perf/<pass>_tflops`, `perf/actor_train_mfu` (on a device whose peak is known),
        `perf/actor_train_tok_per_s` (of this rank's data, which the devices
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
        if peak := peak_tflops(gpu_name()):
            metrics["perf/actor_train_mfu"] = metrics["perf/actor_train_tflops"] / peak
        metrics["perf/actor_train_tok_per_s"] = tokens_per_s
        metrics["perf/actor_train_tok_per_gpu_per_sec"] = tokens_per_s / devices
    waited, trained = seconds.get("train_wait", 0.0), seconds.get("train", 0.0)
    metrics["perf/step_time"] = waited + trained
    metrics["perf/wait_time_ratio"] = waited / (waited + trained) if waited + trained else 0.0
    return metrics


# ---- the data as a file


def save_train_data(template: str, rollout_id: int, micro_batches: MicroBatches, layout: Mapping[str, int]) -> None:
    """Gather the shares of all data-parallel ranks and write them; every rank calls it.

    Args:
        template: path with {rollout_id} and perhaps {rank}, which is the writer's.
        rollout_id: which.
        micro_batches: this rank's share, with every column that was computed.
        layout: this rank's place (`Layout.sizes`).
    """
    # The ranks of one copy of the model hold the same columns: its first one speaks for it.
    is_first = not any(layout[place] for place in ("tp_rank", "pp_rank", "cp_rank"))
    share = _share_of(micro_batches, layout["dp_rank"]) if is_first else None
    gathered: list[dict[str, Any] | None] | None = None
    if dist.get_rank() == WRITER:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(share, gathered, dst=WRITER, group=get_gloo_group())
    if gathered is not None:
        shares = [found for found in gathered if found is not None]
        dump = {"rollout_id": rollout_id, "rank": WRITER, **merge_shares(shares)}
        save_dump(template.format(rollout_id=rollout_id, rank=WRITER), dump)


def _share_of(micro_batches: MicroBatches, dp_rank: int) -> dict[str, Any]:
    """This rank's share on the CPU: its `columns`, its `schedule`, and who it is."""
    data: Mapping[str, Any] = micro_batches.rollout_data
    return {
        "rank": dist.get_rank(),
        "data_parallel_rank": dp_rank,
        "columns": {name: _to_cpu(list(micro_batches.column(name))) for name in micro_batches.columns()},
        "schedule": {name: data[name] for name in SCHEDULE_KEYS if name in data},
    }


def merge_shares(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the shares of all data-parallel ranks.

    Args:
        shares: each with "rank", "data_parallel_rank", "columns" and "schedule".

    Returns:
        `format_version`, `samples`, `dp_shards` and `raw_reward` of the file.
    """
    shares = sorted(shares, key=lambda share: share["data_parallel_rank"])
    samples, shards = [], []
    for share in shares:
        who = {"data_parallel_rank": share["data_parallel_rank"]}
        columns, schedule = share["columns"], share["schedule"]
        shards.append({"rank": share["rank"], **who, "sample_indices": columns["sample_indices"], **schedule})
        for i, position in enumerate(schedule["partition"]):
            fields = {name: column[i] for name, column in columns.items() if name != "sample_indices"}
            place = {"sample_index": columns["sample_indices"][i], "rollout_position": position}
            samples.append(who | place | fields)
    samples.sort(key=lambda sample: sample["rollout_position"])
    return {
        "format_version": FORMAT_VERSION,
        "samples": samples,
        "dp_shards": shards,
        "raw_reward": [sample.get("raw_reward") for sample in samples],
    }


def _to_cpu(value: Any) -> Any:
    """Copies, too: a view of a long tensor would be saved with all of it."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    return [_to_cpu(entry) for entry in value] if isinstance(value, list) else value


# ---- the record next to the rollout's samples

RECORDS_DEADLINE_S = 20.0  # the driver waits half a minute for the ranks to leave


class TrainerRecorder:
    """Writes the file of one rank (--keep-rollouts).

    Args:
        args: reads `output_dir` and `keep_rollouts`.
        rank: among all trainer ranks.
    """

    def __init__(self, args: Args, rank: int) -> None:
        rule = KeepRule.parse(args.keep_rollouts)
        self._rank, self._has_failed = rank, False
        self._writer = RecordWriter(Path(args.output_dir) / DIRECTORY, rule) if rule.records else None

    def record(self, rollout_id: int, micro_batches: MicroBatches, layout: Mapping[str, int]) -> None:
        """Copy this rank's columns to the host and have them written; a failure is logged once.

        Args:
            rollout_id: which.
            micro_batches: this rank's share, with every column that was computed.
            layout: this rank's place (`Layout.sizes`).
        """
        # The ranks of one copy of the model hold the same columns; only the last stage has those of the loss.
        is_last_stage = layout["pp_rank"] == layout["pp_size"] - 1
        if self._writer is None or layout["tp_rank"] or layout["cp_rank"] or not is_last_stage:
            return
        try:
            self._submit(self._writer, rollout_id, micro_batches)
        except Exception:  # the ranks that record nothing would wait for this one in their next collective
            if not self._has_failed:
                self._has_failed = True
                logger.exception("training on rollout %d is not recorded; the run goes on", rollout_id)

    def _submit(self, writer: RecordWriter, rollout_id: int, micro_batches: MicroBatches) -> None:
        columns = {name: found for name in PER_TOKEN if (found := host_column(micro_batches, name)) is not None}
        data = micro_batches.rollout_data
        places = zip(data["partition"], data["sample_indices"], strict=True)
        keys = [(place, index_of(place, index)) for place, index in places]
        path = trainer_path(writer.directory, rollout_id, self._rank)
        write = partial(_write_record, path, keys, columns, rank=self._rank, recorded=data.get("recorded_indices"))
        writer.submit("rollout", f"training on rollout {rollout_id}", write)

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.finish(RECORDS_DEADLINE_S)


def host_column(micro_batches: MicroBatches, name: str) -> list[np.ndarray] | None:
    """Return a column of one number per response token: an array [R] of each sample; None where it does not exist.

    Its values are those before the update. Without a pass of their own those of the loss's first pass are taken.
    """
    lengths = micro_batches.rollout_data["response_lengths"]
    if name in micro_batches.columns():
        column = micro_batches.column(name)
    else:
        column = micro_batches.first_pass_column(name) or ()
    is_tensors = len(column) > 0 and all(isinstance(value, torch.Tensor) for value in column)
    if not is_tensors or [tuple(value.shape) for value in column] != [(length,) for length in lengths]:
        return None
    flat = torch.cat(list(column)).detach().float().cpu().numpy()  # one copy for the whole column
    return np.split(flat, np.cumsum(lengths)[:-1])


def _write_record(
    path: Path,
    keys: list[tuple[int, int]],
    columns: Mapping[str, list[np.ndarray]],
    *,
    rank: int,
    recorded: frozenset[int] | None,
) -> None:
    rows = [
        {"sample_id": place, "index": index, "rank": rank}
        | {name: columns[name][i] if name in columns else None for name in PER_TOKEN}
        for i, (place, index) in enumerate(keys)
        if recorded is None or index in recorded
    ]
    write_tables(path, TRAINER, [pa.Table.from_pylist(rows, schema=TRAINER)], plain=PLAIN_TRAINER)
