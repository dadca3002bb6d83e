"""--ddp-num-buckets: gradients are reduced in about so many pieces, each as soon as it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer_world import trainer_args
from tests.unit.megatron_fakes import make_hf_model, run_world


def count_buckets(args: Any, smallest: int, largest: int) -> None:
    from slime.backends.megatron_utils.model.setup import setup_model_and_optimizer

    wrapped = setup_model_and_optimizer(args).model[0]
    buckets = [bucket for group in wrapped.bucket_groups for bucket in group.buckets]
    assert smallest <= len(buckets) <= largest, len(buckets)
    if largest > 1:
        fair = sum(parameter.numel() for parameter in wrapped.parameters()) / largest
        assert all(bucket.grad_data.numel() >= fair for bucket in buckets[:-1]), "a bucket is closed when it is full"


@pytest.mark.parametrize(
    ("flags", "smallest", "largest"), [("--ddp-num-buckets 5", 3, 5), ("--ddp-num-buckets 1", 1, 1)]
)
def test_gradients_lie_in_so_many_buckets(tmp_path: Path, flags: str, smallest: int, largest: int) -> None:
    make_hf_model(tmp_path)
    args = trainer_args(tmp_path, f"--overlap-grad-reduce {flags}")
    run_world(1, count_buckets, args, smallest, largest)


def check_virtual_stages(args: Any) -> None:
    from slime.backends.megatron_utils.model.setup import setup_model_and_optimizer

    _, second = setup_model_and_optimizer(args).model
    assert len(second.bucket_groups) == 1


def test_virtual_stages_of_unequal_size_have_one_optimizer(tmp_path: Path) -> None:
    """The first has the embedding as well; behind it gradients are reduced in one piece."""
    make_hf_model(tmp_path, num_hidden_layers=4)
    virtual = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    args = trainer_args(tmp_path, f"{virtual} --overlap-grad-reduce --ddp-num-buckets 3")
    run_world(2, check_virtual_stages, args)
