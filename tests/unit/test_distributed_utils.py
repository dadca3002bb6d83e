"""Whitening over one process and over two equals whitening of all their unmasked values together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.utils.distributed_utils import distributed_masked_whiten, get_gloo_group, init_gloo_group

VALUES = torch.tensor([1.0, 2.0, 4.0, 100.0, -3.0, 0.5])
MASK = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])


def expected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = VALUES[MASK.bool()]
    return (values - kept.mean()) / (kept.var() + 1e-8).sqrt()


def test_masked_entries_do_not_count():
    whitened = distributed_masked_whiten(VALUES, MASK)
    torch.testing.assert_close(whitened, expected(VALUES, MASK))
    kept = VALUES[MASK.bool()]
    torch.testing.assert_close(
        distributed_masked_whiten(VALUES, MASK, shift_mean=False), expected(VALUES, MASK) + kept.mean()
    )


def test_one_value_becomes_zero_and_none_is_an_error():
    assert distributed_masked_whiten(torch.tensor([5.0]), torch.ones(1)).item() == 0.0
    with pytest.raises(ValueError, match="masked out"):
        distributed_masked_whiten(VALUES, torch.zeros(6))


def whiten_share(rank: int, store_path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2)
    assert init_gloo_group() is get_gloo_group()
    mine = slice(0, 2) if rank == 0 else slice(2, 6)
    whitened = distributed_masked_whiten(VALUES[mine], MASK[mine], get_gloo_group())
    torch.testing.assert_close(whitened, expected(VALUES[mine], MASK[mine]))
    dist.destroy_process_group()


def test_two_ranks_pool_their_values(tmp_path):
    mp.spawn(whiten_share, args=(str(tmp_path / "store"),), nprocs=2)
