"""Weight sync for engines with slots of their own: a collective broadcast (NCCL on CUDA, gloo on CPU).

The group has the source rank as rank 0 and every rank of every engine behind it. A bucket is flattened into one of two
buffers and goes as one broadcast; over HTTP the engines are told what is in it (load format "flattened_bucket"), and
then take part. While one bucket travels and is loaded, the next is gathered and flattened.

Buckets have to be received in the order in which they are sent, so an engine is told of one when it has answered for
the bucket before. With CUDA it answers when receiving and loading are queued on its GPU, and the source waits for
nothing but a free buffer, on the device: requests and copies overlap. That everything has arrived shows when the
engines are asked for samples.

On CUDA both ends need NCCL_CUMEM_ENABLE=0 in their environment (slime.ray.actor_group sets it for the trainer).
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.base import WeightUpdater
from slime.backends.megatron_utils.update_weight.buffers import BucketBuffers, FlatBucket
from slime.backends.megatron_utils.update_weight.engines import EngineFleet
from slime.backends.megatron_utils.update_weight.transport import Bucket, Posted, Transport
from slime.backends.sglang_utils.weight_transfer import Place, init_process_group
from slime.utils import accelerator
from slime.utils.accelerator import process_group_backend
from slime.utils.distributed_utils import store_at
from slime.utils.memory_saver import outside_saver
from slime.utils.misc import get_current_node_ip, listen_anywhere

GROUP_NAME = "slime-pp_0"


class DistributedWeightUpdater(WeightUpdater):
    """Broadcasts every bucket to the engines."""

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Form the process group with the engines."""
        fleet = self.fleet if self.is_source else None
        return [
            CollectiveTransport(
                fleet,
                engine_sizes,
                deadline_s=self.deadline_s,
                buffer_size=self.args.update_weight_buffer_size,
                keeps_buffers=not self.args.offload_train,
            )
        ]


class CollectiveTransport(Transport):
    """A process group with engines, and two buffers to send from.

    Args:
        fleet: the engines (source rank only; other ranks take no part).
        engine_sizes: ranks of each.
        deadline_s: for forming the group and for each collective.
        buffer_size: bytes of a bucket.
        keeps_buffers: between syncs; the device has memory for them even then.
        backend: None is the device's own.
    """

    num_slots = 2

    def __init__(
        self,
        fleet: EngineFleet | None,
        engine_sizes: list[int],
        *,
        deadline_s: float,
        buffer_size: int,
        keeps_buffers: bool,
        backend: str | None = None,
    ) -> None:
        self._fleet = None if fleet is None else fleet.in_order()
        self._keeps_buffers = keeps_buffers
        self._spans: list[tuple[Any, Any]] = []
        self._buffers = BucketBuffers(self.num_slots, buffer_size, accelerator.current_device())
        if fleet is not None:
            self._form_group(fleet, engine_sizes, deadline_s, backend or process_group_backend())

    def _form_group(self, fleet: EngineFleet, engine_sizes: list[int], deadline_s: float, backend: str) -> None:
        listener = listen_anywhere()
        address, port = get_current_node_ip(), listener.getsockname()[1]
        world_size = 1 + sum(engine_sizes)
        offsets = [1 + sum(engine_sizes[:index]) for index in range(len(fleet))]
        joining = fleet.start_each(
            "init_weights_update_group",
            [((address, port, offset, world_size, GROUP_NAME, backend), {}) for offset in offsets],
        )
        with outside_saver():
            self._group = init_process_group(
                backend=backend,
                meeting=store_at(listener, world_size, timedelta(seconds=deadline_s)),
                world_size=world_size,
                rank=0,
                group_name=GROUP_NAME,
                timeout_s=deadline_s,
            )
        fleet.wait(joining, "the engines' process group")

    def prepare(self, bucket: Bucket, *, slot: int) -> FlatBucket | None:
        """The bucket in the buffer of its slot, on the source rank."""
        return None if self._fleet is None else self._buffers.fill(slot, bucket)

    def post(self, prepared: FlatBucket, *, version: str) -> Posted:
        """Announce the bucket and broadcast it."""
        assert self._fleet is not None, "the source rank alone posts"
        receiving = self._fleet.start(
            "update_weights_from_distributed",
            *announcement(prepared.places),
            group_name=GROUP_NAME,
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
