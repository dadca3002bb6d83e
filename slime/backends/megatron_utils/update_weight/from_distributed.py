"""Weight sync for engines with slots of their own: a collective broadcast (NCCL on CUDA, gloo on CPU).

A group has a rank that sends as rank 0 and every rank of every engine behind it; there is one for each pipeline stage
of the trainer. A bucket is flattened into one of two buffers and goes as one broadcast; over HTTP the engines are told
what is in it (load format "flattened_bucket"), and then take part. While one bucket travels and is loaded, the next is
gathered and flattened.

Buckets have to be received in the order in which they are sent, so an engine is told of one when it has answered for
the bucket before. With CUDA it answers when receiving and loading are queued on its GPU, and the sender waits for
nothing but a free buffer, on the device: requests and copies overlap. That everything has arrived shows when the
engines are asked for samples.

On CUDA both ends need NCCL_CUMEM_ENABLE=0 in their environment (slime.ray.actor_group sets it for the trainer).

The process group of a trainer rank with engines: formed with a deadline, tried out, and named where it fails.

Three steps, each with an answer from every engine: can it connect to this rank; does it join; does a first broadcast
of one byte arrive (in it NCCL makes its connections). The first and the last are asked only of servers of our own: a
stock SGLang knows no such questions, and is silent where it cannot connect.
"""

from __future__ import annotations

import concurrent.futures as cf
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.bucket_updater import BucketUpdater, stage_place
from slime.backends.megatron_utils.update_weight.buckets import (
    Bucket,
    BucketBuffers,
    FlatBucket,
    Posted,
    Transport,
)
from slime.backends.megatron_utils.update_weight.engines import (
    Calls,
    EngineFleet,
    NoLinkError,
    gave_no_answer,
    name_of,
    one_line,
    together,
)
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
from slime.backends.sglang_utils.weight_transfer import Place
from slime.config.args import Args
from slime.processes.wait import settle
from slime.utils import accelerator
from slime.utils.accelerator import process_group_backend
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
        steps.wait(f"did not receive a first broadcast over {backend}", trying, lambda: send_one(group))
    return group


def send_one(group: dist.ProcessGroup) -> None:
    """Broadcast one byte, in which a communicator is made, or fails."""
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


class DistributedWeightUpdater(BucketUpdater):
    """Broadcasts every bucket to the engines, from the pipeline stage that has it.

    Of each stage the first rank sends, in a group of its own with the engines. They take turns: a link into an engine
    is as fast as it is, whoever sends, and engines that took buckets of two groups in different orders would wait for
    each other. While one stage sends, the others gather and flatten their first bucket.
    """

    def __init__(self, args: Args, model: list[Any]) -> None:
        super().__init__(args, model)
        self.place = stage_place()

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the first of its stage."""
        return self.place.is_first_of_stage

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Form the process groups with the engines, one after the other: an engine joins one at a time."""
        found: list[Transport] = []
        for stage in range(self.place.num_stages):
            if stage == self.place.stage:
                found.append(together(lambda: self._transport(engine_sizes)))
            else:
                together(lambda: None)
        return found

    def _transport(self, engine_sizes: list[int]) -> Transport:
        return CollectiveTransport(
            self.fleet if self.is_sender else None,
            engine_sizes,
            group_name=f"{GROUP_NAME}{self.place.stage}",
            deadline_s=self.deadline_s,
            buffer_size=self.args.update_weight_buffer_size,
            keeps_buffers=not self.args.offload_train,
        )

    def _iterate(self) -> Iterator[Bucket]:
        if self.place.num_stages == 1:
            return super()._iterate()
        size = self.args.update_weight_buffer_size
        return iter_hf_buckets(self.args, self.model, buffer_size=size, only_own_stage=True)


class CollectiveTransport(Transport):
    """A process group with engines, and two buffers to send from.

    Args:
        fleet: the engines (on the rank that sends; the others take no part).
        engine_sizes: ranks of each.
        group_name: on both sides.
        deadline_s: for forming the group and for each collective.
        buffer_size: bytes of a bucket.
        keeps_buffers: between syncs; the device has memory for them even then.
        backend: None is the device's own.
    """

    num_slots = 2
    keeps_order = True

    def __init__(
        self,
        fleet: EngineFleet | None,
        engine_sizes: list[int],
        *,
        group_name: str = f"{GROUP_NAME}0",
        deadline_s: float,
        buffer_size: int,
        keeps_buffers: bool,
        backend: str | None = None,
    ) -> None:
        self._fleet = None if fleet is None else fleet.in_order()
        self._group_name = group_name
        self._keeps_buffers = keeps_buffers
        self._spans: list[tuple[Any, Any]] = []
        self._buffers = BucketBuffers(self.num_slots, buffer_size, accelerator.current_device())
        if fleet is not None:
            self._group = form_group(
                fleet,
                engine_sizes,
                name=group_name,
                backend=backend or process_group_backend(),
                deadline_s=deadline_s,
            )

    def prepare(self, bucket: Bucket, *, slot: int) -> FlatBucket | None:
        """The bucket in the buffer of its slot, on the rank that sends."""
        return None if self._fleet is None else self._buffers.fill(slot, bucket)

    def post(self, prepared: FlatBucket, *, version: str) -> Posted:
        """Announce the bucket and broadcast it."""
        assert self._fleet is not None, "only a rank that sends posts"
        receiving = self._fleet.start(
            "update_weights_from_distributed",
            *announcement(prepared.places),
            group_name=self._group_name,
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=version,
        )
        begin = self._now()
        sending = dist.broadcast(prepared.data, 0, group=self._group, async_op=True)

        def finish() -> None:
            # Only when the engines have answered: one that refuses the bucket would leave it waiting for its timeout.
            # With CUDA the stream waits, on which the buffer is filled again.
            sending.wait()
            if begin is not None:
                self._spans.append((begin, self._now()))

        return Posted(receiving, finish)

    def _now(self) -> Any:
        """A mark on the stream; None on CPU."""
        if accelerator.kind() != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def close(self) -> None:
        """Leave the group. What is on its way there may never be taken: nobody waits for it."""
        if self._fleet is not None:
            abandon(self._group)

    def timings(self) -> str:
        """Seconds from a bucket's being ready on the device until it was sent and its buffer was asked for again."""
        spans, self._spans = self._spans, []
        if not spans:
            return ""
        spans[-1][1].synchronize()
        seconds = [begin.elapsed_time(end) / 1000 for begin, end in spans]
        whole = spans[0][0].elapsed_time(spans[-1][1]) / 1000
        return (
            f"on the stream {whole:.4f} in all, a bucket {sum(seconds) / len(seconds):.4f}, {max(seconds):.4f} at most"
        )

    def release(self) -> None:
        """Give the buffers up where the device needs the memory."""
        if not self._keeps_buffers:
            accelerator.synchronize()
            self._buffers.release()


@functools.lru_cache(maxsize=4096)
def announcement(places: tuple[Place, ...]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, types and shapes of a bucket, as engines are told them; made once, for they come again in every sync."""
    return (
        [name for name, _, _, _ in places],
        [str(dtype).removeprefix("torch.") for _, _, dtype, _ in places],
        [list(shape) for _, shape, _, _ in places],
    )
