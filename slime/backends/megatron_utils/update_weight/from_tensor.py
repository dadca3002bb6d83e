"""Weight sync for colocated engines: buckets handed over in memory (`/update_weights_from_tensor`).

A bucket is flattened on the GPU that trainer and engine share, and the engine opens it through a CUDA IPC handle; only
the handle goes through HTTP. Each tensor-parallel rank of an engine is on the GPU of one trainer rank: that one
prepares its bucket and its handle, which are gathered on the source rank. On CPU the source rank alone prepares a
bucket, in shared memory that every rank of every engine maps.

Engines in slots behind the trainer's get the collective instead; so do all engines where CUDA IPC is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.bucket_updater import BucketUpdater
from slime.backends.megatron_utils.update_weight.buckets import Bucket, BucketBuffers, Posted, Transport
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, contact_of, together
from slime.backends.megatron_utils.update_weight.from_distributed import CollectiveTransport
from slime.backends.sglang_utils.weight_transfer import EXPECTED, NUM_BYTES, opened_elsewhere, serialize_flat
from slime.utils import accelerator
from slime.utils.distributed_utils import gathered, get_gloo_group

logger = logging.getLogger(__name__)

Receivers = dict[int, list[int]]
"""Number of an engine -> for each of its ranks, the trainer rank that makes its handle."""


class TensorWeightUpdater(BucketUpdater):
    """Sends flattened buckets through memory that trainer and engines share."""

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Find out which trainer rank shares a GPU with which engine rank (collective)."""
        is_cuda = accelerator.current_device().type == "cuda"
        refusal = next(filter(None, gathered(ipc_refusal() if is_cuda else None)), None)
        if refusal and self.is_source:
            logger.warning("CUDA IPC is refused (%s): weights go to the engines by the collective, on gloo", refusal)
        receivers, others = Receivers(), list[int]()
        if self.is_source:
            slots = first_slots(self.fleet, engine_sizes)
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1
            receivers, others = split_engines(slots, engine_sizes, num_ranks if is_cuda else 0)
        receivers, others = gathered((receivers, others))[0]
        transports: list[Transport] = []
        buffer_size, keeps_buffers = self.args.update_weight_buffer_size, not self.args.offload_train
        if refusal:
            receivers, others = {}, sorted([*receivers, *others])
        if receivers:
            fleet = self.fleet.some(sorted(receivers)) if self.is_source else None
            transports.append(HandOver(fleet, receivers, buffer_size=buffer_size, keeps_buffers=keeps_buffers))
        if others:
            fleet = self.fleet.some(others) if self.is_source else None
            sizes = [engine_sizes[number] for number in others]
            # NCCL takes no two ranks on one GPU.
            backend = "gloo" if refusal else None
            transports.append(
                together(
                    lambda: CollectiveTransport(
                        fleet,
                        sizes,
                        deadline_s=self.deadline_s,
                        buffer_size=buffer_size,
                        keeps_buffers=keeps_buffers,
                        backend=backend,
                    )
                )
            )
        return transports


@functools.cache
def ipc_refusal() -> str | None:
    """Why CUDA memory cannot be shared with another process here; None where it can. Takes seconds the first time.

    Asked before the first sync: where a container or a driver forbids it, SGLang's scheduler would die of the attempt.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = BucketBuffers(1, NUM_BYTES, device)
    try:
        flat = buffers.fill(0, [("probe", torch.full((NUM_BYTES,), EXPECTED, dtype=torch.uint8, device=device))])
        handles, kept = serialize_flat(flat.data, [], 1)
    except RuntimeError as error:  # torch passes on what the driver says
        return str(error).splitlines()[0]
    reason = opened_elsewhere(handles[0])
    del kept
    return reason


def first_slots(fleet: EngineFleet, sizes: Sequence[int]) -> list[int]:
    """The first slot of each engine; those that do not know theirs lie one behind the other."""
    found = []
    for number, engine in fleet.engines.items():
        known = contact_of(engine, number).first_slot
        found.append(sum(sizes[:number]) if known is None else known)
    return found


def split_engines(slots: Sequence[int], sizes: Sequence[int], num_ranks: int) -> tuple[Receivers, list[int]]:
    """Which engines are in the trainer's slots, and which are not.

    Args:
        slots: first slot of each engine. sizes: how many it has.
        num_ranks: of the trainer; rank r is in slot r. 0: all memory is the source's (CPU).

    Returns:
        (engine -> trainer rank of each of its ranks, the other engines).
    """
    receivers, others = Receivers(), []
    for number, (first, size) in enumerate(zip(slots, sizes, strict=True)):
        if num_ranks == 0:
            receivers[number] = [0] * size
        elif first + size <= num_ranks:
            receivers[number] = list(range(first, first + size))
        else:
            others.append(number)
    return receivers, others


class HandOver(Transport):
    """Two buffers a rank, filled and opened in turn.

    Args:
        fleet: the engines that take handles (source rank only).
        receivers: whose memory their ranks open.
        buffer_size: bytes of a bucket.
        keeps_buffers: between syncs; the device has memory for them even then.
    """

    num_slots = 2

    def __init__(
        self, fleet: EngineFleet | None, receivers: Receivers, *, buffer_size: int, keeps_buffers: bool
    ) -> None:
        self._fleet = fleet
        self._receivers = receivers
        self._keeps_buffers = keeps_buffers
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        self._num_handles = sum(ranks.count(own_rank) for ranks in receivers.values())
        self._buffers = BucketBuffers(self.num_slots, buffer_size, accelerator.current_device())
        self._kept: dict[int, Any] = {}
        self.shares_memory = len({rank for ranks in receivers.values() for rank in ranks} | {0}) > 1

    def prepare(self, bucket: Bucket, *, slot: int) -> list[list[str]]:
        """The handles that each trainer rank made, on the source rank; one for every engine rank that opens them."""
        handles: list[str] = []
        if self._num_handles:
            self._kept.pop(slot, None)  # everyone has closed it, so that torch may forget it
            flat = self._buffers.fill(slot, bucket)
            handles, self._kept[slot] = serialize_flat(flat.data, flat.places, self._num_handles)
        return self._gather(handles)

    def _gather(self, handles: list[str]) -> list[list[str]]:
        if not self.shares_memory:
            return [handles]
        found = [list[str]() for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather_object(handles, found, dst=0, group=get_gloo_group())
        return found or []

    def post(self, prepared: list[list[str]], *, version: str) -> Posted:
        """Give every engine the handles of its ranks."""
        assert self._fleet is not None, "the source rank alone posts"
        left = [iter(handles) for handles in prepared]
        keywords = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": version}
        calls = [
            (([next(left[rank]) for rank in self._receivers[number]],), keywords) for number in self._fleet.engines
        ]
        return Posted(self._fleet.start_each("update_weights_from_tensor", calls))

    def release(self) -> None:
        """Let torch forget the handles, and give the buffers up where the device needs the memory."""
        self._kept.clear()
        if not self._keeps_buffers:
            self._buffers.release()
