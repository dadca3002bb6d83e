"""Small helpers over torch.distributed process groups.

They know nothing about parallel layout: a group is handed in, or is the one gloo group over all ranks.
"""

from __future__ import annotations

import functools
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.processes.wait import WaitTimeout

EVERYWHERE = ("0.0.0.0", "::")  # nosec B104
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Megatron's default of --distributed-timeout-minutes is shorter: whoever has flags passes that."""


def store_at(listener: socket.socket, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Rank 0's store for forming a group, served at a socket that listens already, which it takes over.

    The others connect with `tcp://address:port`. A port that is only chosen now and bound later may be gone by then.

    Args:
        listener: of `slime.utils.misc.listen_anywhere`.
        world_size: of the group.
        timeout: of every wait for a key.
    """
    host, port = listener.getsockname()[:2]
    # It waits for nobody here: forming the group does, with a message that says who is missing.
    return dist.TCPStore(
        "localhost" if host in EVERYWHERE else host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def init_process_group(
    backend: str,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
) -> dist.ProcessGroup:
    """Join a process group next to the default one, as SGLang's servers do with the same name.

    Args:
        group_name: names the group's keys in the store.
        backend, init_method, timeout, world_size, rank, store, pg_options: as torch.distributed.init_process_group
            has them; of `init_method` and `store` one is given.
    """
    if store is None:
        store, rank, world_size = next(c10d.rendezvous(init_method or "env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
    prefixed = dist.PrefixStore(group_name, store)
    how = {"group_name": group_name, "backend_options": pg_options, "timeout": timeout}
    group, _ = c10d._new_process_group_helper(world_size, rank, [], dist.Backend(backend), prefixed, **how)
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def get_gloo_group() -> dist.ProcessGroup:
    """The gloo group over all ranks, for objects and host tensors; the first call is collective.

    A default group that is gloo itself is not remembered: it may be made anew (reloadable_process_group).
    """
    return dist.group.WORLD if dist.get_backend() == "gloo" else _own_gloo_group()


class _Own:
    """How long an operation of the gloo group may take, in this process."""

    timeout = DEFAULT_TIMEOUT


@functools.cache
def _own_gloo_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=_Own.timeout)


def init_gloo_group(timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """Make the gloo group over all ranks; every rank calls it once, after the default process group exists.

    Args:
        timeout: of each of its operations, and of `barrier` where that is given none.
    """
    _own_gloo_group.cache_clear()
    _Own.timeout = timeout
    return get_gloo_group()


def barrier(what: str, deadline_s: float | None = None) -> None:
    """Wait until every rank is here; the only barrier of this project, for it says which rank did not come.

    Args:
        what: what the ranks do before it, as it is to appear in the error ("the checkpoint /path").
        deadline_s: for all to come; None is the timeout of the gloo group.

    Raises:
        WaitTimeout: on rank 0 with the ranks that did not come, on the others with what torch knows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    timeout = _Own.timeout if deadline_s is None else timedelta(seconds=deadline_s)
    try:
        dist.monitored_barrier(group=get_gloo_group(), timeout=timeout)
    except RuntimeError as error:
        raise WaitTimeout(f"waited {timeout.total_seconds():g} s for every rank to finish {what}: {error}") from error


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, on every rank; without other ranks, of this one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=get_gloo_group())
    return found


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """Scale `values` to unit variance over the masked entries of every rank of the group.

    Args:
        values: any shape.
        mask: same shape, 1 = counts.
        process_group: ranks whose entries are pooled; None = this rank only.
        shift_mean: also subtract the mean (False puts it back).
        epsilon: added to the variance.

    Raises:
        ValueError: no entry of any rank is unmasked.
    """
    mask = mask.to(values.dtype)
    sums = torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()]).double()
    if process_group is not None:
        dist.all_reduce(sums, group=process_group)
    count, total, squares = sums
    if count == 0:
        raise ValueError("cannot whiten: every token of every sample is masked out")
    mean = total / count
    # the unbiased estimate, as torch.var; one entry alone has no spread to measure
    variance = (squares / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    whitened = (values - mean.to(values.dtype)) * torch.rsqrt(variance + epsilon).to(values.dtype)
    return whitened if shift_mean else whitened + mean.to(values.dtype)
