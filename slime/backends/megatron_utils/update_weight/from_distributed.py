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
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.backends.megatron_utils.update_weight.bucket_stream import Bucket, Posted, Timeline, Transport
from slime.backends.megatron_utils.update_weight.bucket_updater import BucketUpdater
from slime.backends.megatron_utils.update_weight.buffers import BucketBuffers, FlatBucket
from slime.backends.megatron_utils.update_weight.engine_group import GROUP_NAME, abandon, form_group
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, WeightSyncError, together
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
from slime.backends.sglang_utils.weight_transfer import Place
from slime.config.args import Args
from slime.utils import accelerator
from slime.utils.accelerator import process_group_backend
from slime.utils.distributed_utils import gathered, get_gloo_group


class DistributedWeightUpdater(BucketUpdater):
    """Broadcasts every bucket to the engines, from the pipeline stage that has it.

    Of each stage the first rank sends, in a group of its own with the engines. They take turns: a link into an engine
    is as fast as it is, whoever sends, and engines that took buckets of two groups in different orders would wait for
    each other. While one stage sends, the others gather and flatten their first bucket.
    """

    def __init__(self, args: Args, model: list[Any]) -> None:
        super().__init__(args, model)
        self._place = stage_place()

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the first of its stage."""
        return self._place.is_first_of_stage

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Form the process groups with the engines, one after the other: an engine joins one at a time."""
        found: list[Transport] = []
        for stage in range(self._place.num_stages):
            if stage == self._place.stage:
                found.append(together(lambda: self._transport(engine_sizes)))
            else:
                together(lambda: None)
        return found

    def _transport(self, engine_sizes: list[int]) -> Transport:
        return CollectiveTransport(
            self.fleet if self.is_sender else None,
            engine_sizes,
            group_name=f"{GROUP_NAME}{self._place.stage}",
            deadline_s=self.deadline_s,
            buffer_size=self.args.update_weight_buffer_size,
            keeps_buffers=not self.args.offload_train,
        )

    def _iterate(self) -> Iterator[Bucket]:
        if self._place.num_stages == 1:
            return super()._iterate()
        size = self.args.update_weight_buffer_size
        return iter_hf_buckets(self.args, self.model, buffer_size=size, only_own_stage=True)

    def _part_version(self) -> str:
        part = f".{self._place.stage}" if self._place.num_stages > 1 else ""
        return f"{self.weight_version}{part}"

    def _await_turn(self, times: Timeline) -> None:
        if self._place.sender_before is not None:
            with times.stage("waiting for other stages"):
                dist.recv(torch.zeros(1), src=self._place.sender_before, group=get_gloo_group())

    def _end_turn(self) -> None:
        if self._place.sender_after is not None:
            dist.send(torch.zeros(1), dst=self._place.sender_after, group=get_gloo_group())

    def _of_all_senders(self, error: WeightSyncError | None) -> WeightSyncError | None:
        if self._place.num_stages == 1:
            return error
        parts = gathered((error, self.checks.sent.on_host()) if self.is_sender else None)
        if not self.is_source:
            return None
        for failed, sent in filter(None, parts[1:]):
            error = error or failed
            self.checks.sent.add(sent)
        return error


@dataclass(frozen=True)
class StagePlace:
    """Where a rank is among those that send.

    Attributes:
        stage: of the pipeline.
        num_stages: of all.
        is_first_of_stage: it sends what the stage has.
        sender_before: rank that sends before it, in the next lower stage; None where there is no such stage, and on
            ranks that do not send.
        sender_after: likewise, in the next higher one.
    """

    stage: int = 0
    num_stages: int = 1
    is_first_of_stage: bool = True
    sender_before: int | None = None
    sender_after: int | None = None


def stage_place() -> StagePlace:
    """This rank's, by Megatron's groups; of a process without other ranks, the only one."""
    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        return StagePlace()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if copy or parallel_state.get_tensor_model_parallel_rank():
        return StagePlace(stage, len(ranks), is_first_of_stage=False)
    return StagePlace(
        stage,
        len(ranks),
        sender_before=ranks[stage - 1] if stage > 0 else None,
        sender_after=ranks[stage + 1] if stage + 1 < len(ranks) else None,
    )


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
