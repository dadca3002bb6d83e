"""The trainer's side of a rollout as a file (--save-debug-train-data): what each rank trained on and computed.

    {"format_version": 2, "rollout_id", "rank",
     "samples": [{"data_parallel_rank", "sample_index", "rollout_position", <one entry of every column>}],
     "dp_shards": [{"rank", "data_parallel_rank", "sample_indices", "partition", "micro_batch_indices",
                    "num_microbatches", "global_batch_sizes"}],
     "raw_reward": [...]}

`samples` and `raw_reward` are in the order of the rollout, `rollout_position` is the place in it. Columns are named as
everywhere (slime.utils.train_data), so `log_probs` are the trainer's before the update. tools/inspect_dump.py reads
it. It knows nothing about how the columns come about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.backends.megatron_utils.data import SCHEDULE_KEYS, MicroBatches
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.dumps import save_dump

FORMAT_VERSION = 2
WRITER = 0
"""The rank that gathers the shares and writes the file."""


def save_train_data(template: str, rollout_id: int, micro_batches: MicroBatches) -> None:
    """Gather the shares of all data-parallel ranks and write them; every rank calls it.

    Args:
        template: path with {rollout_id} and perhaps {rank}, which is the writer's.
        rollout_id: which.
        micro_batches: this rank's share, with every column that was computed.
    """
    # The ranks of one copy of the model hold the same columns: its first one speaks for it.
    places = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    share = None if any(places) else share_of(micro_batches)
    gathered: list[dict[str, Any] | None] | None = None
    if dist.get_rank() == WRITER:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(share, gathered, dst=WRITER, group=get_gloo_group())
    if gathered is not None:
        shares = [found for found in gathered if found is not None]
        dump = {"rollout_id": rollout_id, "rank": WRITER, **merge_shares(shares)}
        save_dump(template.format(rollout_id=rollout_id, rank=WRITER), dump)


def share_of(micro_batches: MicroBatches) -> dict[str, Any]:
    """This rank's share on the CPU: its `columns`, its `schedule`, and who it is."""
    data: Mapping[str, Any] = micro_batches.rollout_data
    return {
        "rank": dist.get_rank(),
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "columns": {name: _to_cpu(list(micro_batches.column(name))) for name in micro_batches.columns()},
        "schedule": {name: data[name] for name in SCHEDULE_KEYS if name in data},
    }


def merge_shares(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`format_version`, `samples`, `dp_shards` and `raw_reward` of what `share_of` gave on each data-parallel rank."""
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
