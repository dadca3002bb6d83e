"""One rollout's `TrainData` -> each data-parallel rank's share of it.

Pure: the schedule comes from `slime.utils.dp_schedule`, the shares are plain dicts; it knows nothing about Ray or
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.args import Args
from slime.utils.dp_schedule import build_dp_schedule

SCHEDULE_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def split_train_data(
    args: Args, train_data: Mapping[str, Any], parallel_config: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Cut every column of a rollout by rank.

    Args:
        args: `global_batch_size`, `drop_last_rollouts` and what `build_dp_schedule` reads.
        train_data: columns of one value per sample; a column of another length is not per sample and goes to
            every rank.
        parallel_config: the trainer's `dp_size` and `cp_size` (and `vpp_size`).

    Returns:
        [dp] dict of the same columns, in the order in which the rank trains them, plus `total_lengths` (tokens of each
        sample), `partition` (indices into the rollout), `micro_batch_indices`, `num_microbatches`,
        `global_batch_sizes`.

    Raises:
        ValueError: some executions fill no train step, and --drop-last-rollouts is off.
    """
    if not args.drop_last_rollouts:
        _check_rest(len(set(train_data["rollout_ids"])), args.global_batch_size)
    num_samples = len(train_data["tokens"])
    total_lengths = [len(tokens) for tokens in train_data["tokens"]]
    columns = {**train_data, "total_lengths": total_lengths}
    schedule = build_dp_schedule(
        args,
        parallel_config,
        total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=train_data["rollout_ids"],
    )
    return [
        {
            **{name: _take(values, partition, num_samples) for name, values in columns.items()},
            "partition": partition,
            "micro_batch_indices": schedule.micro_batch_indices[rank],
            "num_microbatches": schedule.num_microbatches,
            "global_batch_sizes": schedule.global_batch_sizes,
        }
        for rank, partition in enumerate(schedule.partitions)
    ]


def _check_rest(num_rollouts: int, global_batch_size: int) -> None:
    if rest := num_rollouts % global_batch_size:
        raise ValueError(
            f"{num_rollouts} samples were generated, which do not divide into train steps of --global-batch-size "
            f"{global_batch_size}; return a multiple of it, or leave out the last {rest} with --drop-last-rollouts"
        )


def _take(values: Any, partition: list[int], num_samples: int) -> Any:
    if isinstance(values, list) and len(values) == num_samples:
        return [values[i] for i in partition]
    return values
