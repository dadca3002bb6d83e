"""--save-debug-train-data: what every rank trained on is in one file, in the order of the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slime.checkpoints.rollout_files import load_dump
from slime.training.reports import merge_shares
from tests.integration.trainer_world import NUM_SAMPLES, make_train_data, train, trainer_args


def nothing(actor: Any, records: list[Any]) -> None:
    pass


def test_every_ranks_samples_are_in_one_file_in_the_order_of_the_rollout(hf_path: Path, tmp_path: Path):
    template = str(tmp_path / "{rollout_id}-{rank}.pt")
    train(trainer_args(hf_path, dp_size=2, save_debug_train_data=template), nothing, dp_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["0-0.pt"], "one writer, and nothing unfinished"
    dump, given = load_dump(tmp_path / "0-0.pt"), make_train_data()
    assert (dump["format_version"], dump["rollout_id"], dump["rank"]) == (2, 0, 0)
    assert dump["raw_reward"] == given["raw_reward"]
    samples = dump["samples"]
    assert [sample["rollout_position"] for sample in samples] == list(range(NUM_SAMPLES))
    assert [sample["sample_index"] for sample in samples] == given["sample_indices"]
    assert [sample["tokens"].tolist() for sample in samples] == given["tokens"]
    assert [sample["loss_masks"].tolist() for sample in samples] == given["loss_masks"]
    for sample, rollout_log_probs in zip(samples, given["rollout_log_probs"], strict=True):
        assert torch.allclose(sample["rollout_log_probs"], torch.tensor(rollout_log_probs))
        assert sample["log_probs"].shape == sample["advantages"].shape == sample["rollout_log_probs"].shape
        assert sample["log_probs"].untyped_storage().nbytes() == 4 * len(rollout_log_probs), "not a view of the batch"
    shards = dump["dp_shards"]
    assert [shard["data_parallel_rank"] for shard in shards] == [0, 1]
    assert sorted(shards[0]["partition"] + shards[1]["partition"]) == list(range(NUM_SAMPLES))
    for shard in shards:
        assert shard["sample_indices"] == shard["partition"], "in this rollout a sample's number is its place"
        of_rank = [sample["rollout_position"] for sample in samples if sample["data_parallel_rank"] == shard["rank"]]
        assert of_rank == sorted(shard["partition"])
        assert {"micro_batch_indices", "num_microbatches", "global_batch_sizes"} <= shard.keys()


def test_ranks_of_one_copy_of_the_model_write_its_samples_once(hf_path: Path, tmp_path: Path):
    args = trainer_args(
        hf_path, "--tensor-model-parallel-size 2", save_debug_train_data=str(tmp_path / "{rollout_id}.pt")
    )
    train(args, nothing)
    dump = load_dump(tmp_path / "0.pt")
    assert len(dump["dp_shards"]) == 1 and len(dump["samples"]) == NUM_SAMPLES


def test_shares_are_merged_by_their_place_whatever_columns_they_have():
    def share(rank: int, partition: list[int]) -> dict[str, Any]:
        columns = {"sample_indices": [10 + i for i in partition], "raw_reward": [i / 2 for i in partition]}
        schedule = {"partition": partition, "num_microbatches": [1]}
        extra = {"mine": [torch.full((2,), float(i)) for i in partition]}
        return {"rank": rank * 4, "data_parallel_rank": rank, "columns": columns | extra, "schedule": schedule}

    merged = merge_shares([share(1, [0, 3]), share(0, [2, 1])])
    assert [shard["rank"] for shard in merged["dp_shards"]] == [0, 4]
    assert merged["raw_reward"] == [0.0, 0.5, 1.0, 1.5]
    assert [sample["mine"].tolist() for sample in merged["samples"]] == [[float(i)] * 2 for i in range(4)]
    assert [sample["sample_index"] for sample in merged["samples"]] == [10, 11, 12, 13]
