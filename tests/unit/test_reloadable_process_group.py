"""Groups that are destroyed and made again work for whoever holds them: two real processes over gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

from slime.utils.accelerator import reloadable_process_group as groups
from slime.utils.distributed_utils import get_gloo_group, init_gloo_group

TIMEOUT = timedelta(seconds=60)


def sum_over(group: dist.ProcessGroup | None) -> float:
    """Rank r gives r + 1."""
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()


def use(pair: dist.ProcessGroup, mine: dist.ProcessGroup, rank: int) -> None:
    """What Megatron does with groups: collectives, ranks, objects, batched sends."""
    assert (sum_over(pair), sum_over(mine), sum_over(None)) == (3.0, rank + 1.0, 3.0)
    assert (dist.get_world_size(pair), dist.get_rank(pair), dist.get_backend(pair)) == (2, rank, "gloo")
    assert dist.get_process_group_ranks(mine) == [rank] and mine.rank() == 0
    assert dist.get_global_rank(mine, 0) == rank
    found: list[object] = [None, None]
    dist.all_gather_object(found, f"rank {rank}", group=pair)
    assert found == ["rank 0", "rank 1"]
    rows = torch.empty(2)
    dist.all_gather_into_tensor(rows, torch.tensor([float(rank)]), group=pair)
    assert rows.tolist() == [0.0, 1.0]
    received = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), 1 - rank, pair),
        dist.P2POp(dist.irecv, received, 1 - rank, pair),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert received.item() == 1.0 - rank
    dist.monitored_barrier(group=get_gloo_group(), timeout=TIMEOUT)


def destroy_and_reload(rank: int, store_path: str, default_too: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2, timeout=TIMEOUT)
    of_torch = dist.new_group
    groups.install(backend="gloo", timeout=TIMEOUT)
    init_gloo_group()
    pair = dist.new_group([0, 1], timeout=TIMEOUT)
    mine = [dist.new_group([other], backend="gloo") for other in (0, 1)][rank]  # of the other one it is no member
    world = dist.group.WORLD
    for _ in range(3):
        use(pair, mine, rank)
        groups.destroy_process_groups(default_too=default_too)
        assert dist.is_initialized() is not default_too
        assert not (set(c10d._world.pg_map) - {world}), "a real group would be left"
        assert (pair.size(), pair.rank()) == (2, rank), "sizes can be asked for"
        with pytest.raises(RuntimeError, match="put away.*must be woken up"):
            pair.allreduce(torch.ones(1))
        groups.reload_process_groups()
        assert (dist.group.WORLD is world) is not default_too
    use(pair, mine, rank)
    dist.destroy_process_group()
    groups.uninstall()
    assert dist.new_group is of_torch


@pytest.mark.parametrize("default_too", [True, False])
def test_two_ranks_go_on_with_the_same_objects_after_their_groups_were_made_anew(tmp_path, default_too):
    mp.start_processes(destroy_and_reload, args=(str(tmp_path / "store"), default_too), nprocs=2, start_method="fork")


def keep_what_others_made(rank: int, store_path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2, timeout=TIMEOUT)
    others = dist.new_group([0, 1])
    groups.install(backend="gloo", timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    groups.destroy_process_groups()
    assert (sum_over(others), sum_over(None)) == (3.0, 3.0)
    groups.reload_process_groups()
    assert sum_over(pair) == 3.0
    dist.destroy_process_group()


def test_a_group_that_is_not_reloadable_keeps_the_default_group_alive(tmp_path):
    mp.start_processes(keep_what_others_made, args=(str(tmp_path / "store"),), nprocs=2, start_method="fork")


def test_without_install_nothing_is_destroyed():
    for verb in (groups.destroy_process_groups, groups.reload_process_groups):
        with pytest.raises(RuntimeError, match="install"):
            verb()


def keep_when_alone(rank: int, store_path: str) -> None:
    torch.set_num_threads(1)  # the fork has no thread pool
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=1, timeout=TIMEOUT)
    groups.install(backend="gloo", timeout=TIMEOUT)
    pair = dist.new_group([0], timeout=TIMEOUT)
    real = pair.live
    groups.destroy_process_groups()
    groups.reload_process_groups()
    assert pair.live is real and sum_over(pair) == sum_over(None) == 1.0
    dist.destroy_process_group()  # its threads would end in the middle of the interpreter's end


def test_a_world_of_one_rank_keeps_its_groups(tmp_path: object) -> None:
    mp.start_processes(keep_when_alone, args=(f"{tmp_path}/store",), nprocs=1, start_method="fork")
