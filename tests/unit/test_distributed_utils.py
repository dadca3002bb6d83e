"""Whitening over one process and over two equals whitening of all their unmasked values together."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.processes.wait import WaitTimeout
from slime.ray.utils import RayActor
from slime.utils.distributed_utils import barrier, distributed_masked_whiten, get_gloo_group, init_gloo_group, store_at
from slime.utils.misc import listen_anywhere

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
    torch.set_num_threads(1)  # the fork has no thread pool
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2)
    assert init_gloo_group() is get_gloo_group()
    mine = slice(0, 2) if rank == 0 else slice(2, 6)
    whitened = distributed_masked_whiten(VALUES[mine], MASK[mine], get_gloo_group())
    torch.testing.assert_close(whitened, expected(VALUES[mine], MASK[mine]))
    barrier("the sum", 20)
    if rank == 0:  # the other one does not come to the second barrier
        with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for every rank to finish the lunch: .*[Rr]ank.*1"):
            barrier("the lunch", 0.3)
    dist.destroy_process_group()


def test_two_ranks_pool_their_values_and_a_barrier_names_the_rank_that_does_not_come(tmp_path):
    mp.start_processes(whiten_share, args=(str(tmp_path / "store"),), nprocs=2, start_method="fork")


def test_two_starts_at_once_get_different_ports_and_nobody_else_gets_them_before_they_are_used():
    listeners = [listen_anywhere() for _ in range(10)]
    ports = [listener.getsockname()[1] for listener in listeners]
    assert len(set(ports)) == 10
    for host in ("", "127.0.0.1"):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, ports[0]))  # with SO_REUSEADDR, as torch's own store has
    stores = [store_at(listener, 2, timedelta(seconds=20)) for listener in listeners]
    for number, port in enumerate(ports):
        other = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=20))
        other.set("start", str(number))
    assert [store.get("start") for store in stores] == [str(number).encode() for number in range(10)]
    for listener in listeners:
        assert listener.fileno() == -1, "the store has taken the socket over, and closes it"


def test_an_actor_listens_at_the_port_that_it_tells_the_other_ranks(monkeypatch):
    monkeypatch.setattr(RayActor, "node_address", lambda self: "127.0.0.1")  # the real one asks a Ray cluster
    actor = RayActor()
    socket.create_connection(actor.master_address(), timeout=5).close()
