"""--ddp-num-buckets: gradients are reduced in about so many pieces, each as soon as it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.megatron_fakes import make_args, make_hf_model, run_world


def count_buckets(args: Any, smallest: int, largest: int) -> None:
    from slime.backends.megatron_utils.model.setup import build_model, wrap_model

    wrapped = wrap_model(args, build_model(args))
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
    args = make_args(tmp_path, f"--overlap-grad-reduce {flags}")
    run_world(1, count_buckets, args, smallest, largest)
