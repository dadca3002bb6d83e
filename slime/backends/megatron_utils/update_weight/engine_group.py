"""The process group of a trainer rank with engines: formed with a deadline, tried out, and named where it fails.

Three steps, each with an answer from every engine: can it connect to this rank; does it join; does a first broadcast
of one byte arrive (in it NCCL makes its connections). The first and the last are asked only of servers of our own: a
stock SGLang knows no such questions, and is silent where it cannot connect.
"""

from __future__ import annotations

import concurrent.futures as cf
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.engines import (
    Calls,
    EngineFleet,
    NoLinkError,
    gave_no_answer,
    name_of,
    one_line,
)
from slime.processes.wait import settle
from slime.utils import accelerator
from slime.utils.accelerator.memory_saver import outside_saver
from slime.utils.distributed_utils import init_process_group, store_at
from slime.utils.misc import get_current_node_ip, listen_anywhere

GROUP_NAME = "slime-pp_"
"""What the name of a group begins with; then comes the pipeline stage that sends in it."""
SHARE_OF_DEADLINE = 0.5
"""For all steps: the other ranks of the trainer wait meanwhile, with the whole deadline."""

_abandoned: list[Any] = []
"""Groups of gloo with a broadcast under way: their end would wait for it."""


def form_group(
    fleet: EngineFleet, engine_sizes: Sequence[int], *, name: str, backend: str, deadline_s: float
) -> dist.ProcessGroup:
    """Form a group of this rank, as rank 0, and all ranks of engines behind it.

    Args:
        fleet: the engines.
        engine_sizes: ranks of each.
        name: of the group, on both sides.
        backend: "nccl" or "gloo".
        deadline_s: of a collective; forming the group has a part of it.

    Raises:
        NoLinkError: names the engine that cannot connect, refuses or is silent, and this rank's address and interface.
    """
    address = get_current_node_ip()
    listener = listen_anywhere(address)
    port = listener.getsockname()[1]
    steps = _Steps(fleet, f"{address}:{port} (interface {interface_of(address)})", deadline_s * SHARE_OF_DEADLINE)
    ours = fleet.some([number for number, engine in fleet.engines.items() if getattr(engine, "is_ours", False)])
    steps.wait("cannot connect to the trainer", ours.start("probe_link", address, port))

    world_size = 1 + sum(engine_sizes)
    offsets = [1 + sum(engine_sizes[:index]) for index in range(len(fleet))]
    store = store_at(listener, world_size, timedelta(seconds=deadline_s))

    def join() -> dist.ProcessGroup:
        return init_process_group(
            backend=backend,
            store=store,
            world_size=world_size,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=deadline_s),
        )

    joining = fleet.start_each(
        "init_weights_update_group",
        [((address, port, offset, world_size, name, backend), {}) for offset in offsets],
    )
    group: dist.ProcessGroup = steps.wait("did not join the trainer's process group", joining, join)
    if len(ours) == len(fleet):
        trying = fleet.start("try_broadcast", name)
        steps.wait(f"did not receive a first broadcast over {backend}", trying, lambda: _send_one(group))
    return group


def _send_one(group: dist.ProcessGroup) -> None:
    device = accelerator.current_device()
    dist.broadcast(torch.ones(1, dtype=torch.uint8, device=device), 0, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Steps:
    """What the steps of forming a group share.

    Args:
        fleet: the engines.
        place: where they find this rank, for messages.
        deadline_s: of all steps together.
    """

    def __init__(self, fleet: EngineFleet, place: str, deadline_s: float) -> None:
        self._fleet = fleet
        self._place = place
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def wait(self, failure: str, calls: Calls, own: Callable[[], Any] = lambda: None) -> Any:
        """Do `own` while engines answer, and return what it does; `failure` is what to say of an engine otherwise."""
        mine = in_background(own)
        left = max(0.0, self._end - time.monotonic())
        done, pending = cf.wait([*calls.values(), mine], timeout=left, return_when=cf.FIRST_EXCEPTION)
        for number, call in calls.items():
            if call in done and (error := call.exception()) is not None:
                mute = [number] if gave_no_answer(error) else []
                raise self._error(f"{self._name(number)} {failure}", one_line(error), silent=mute) from error
        if mine in done and (error := mine.exception()) is not None:
            raise self._error(f"an engine {failure}", one_line(error)) from error
        if pending:
            silent = [self._name(number) for number, call in calls.items() if call in pending]
            raise self._error(
                f"{' and '.join(silent or ['an engine'])} {failure}", f"no answer within {self._deadline_s:.0f} s"
            )
        return mine.result()

    def _name(self, number: int) -> str:
        return name_of(self._fleet.engines[number], number)

    def _error(self, what: str, why: str, *, silent: Sequence[int] = ()) -> NoLinkError:
        # Of those that are silent when the time is over, some only wait for the one that hangs: none is named.
        return NoLinkError(
            f"{what} at {self._place}: {why}. Let the hosts reach each other (GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME choose an interface), or give --update-weight-disk-dir, a directory that trainer and "
            "engines share.",
            silent=silent,
        )


def in_background(action: Callable[[], Any]) -> cf.Future[Any]:
    """Do something in a thread that the end of the process does not wait for: a collective cannot be called off.

    As here, it is about this process's device, and outside of the memory saver; both are a thread's own.
    """
    found: cf.Future[Any] = cf.Future()
    device = accelerator.current_device()

    def run() -> Any:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with outside_saver():
            return action()

    threading.Thread(target=settle, args=(found, run), name="engine-group", daemon=True).start()
    return found


def interface_of(address: str) -> str:
    """The name of the network interface that has an address; "unknown" where none has."""
    found = (name for name, known in psutil.net_if_addrs().items() if any(one.address == address for one in known))
    return next(found, "unknown")


def abandon(group: dist.ProcessGroup) -> None:
    """Leave a group in which something may be under way that is never taken."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        _abandoned.append(group)
        dist.destroy_process_group(group)
