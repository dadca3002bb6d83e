"""Send the weights bucket by bucket, over one transport or several, from one rank or several."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.backends.megatron_utils.update_weight.base import WeightUpdater
from slime.backends.megatron_utils.update_weight.buckets import BucketStream, Posted, Timeline, Transport
from slime.backends.megatron_utils.update_weight.engines import WeightSyncError
from slime.config.args import Args
from slime.utils.distributed_utils import gathered, get_gloo_group

logger = logging.getLogger(__name__)


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


class BucketUpdater(WeightUpdater):
    """Hands every bucket to the engines over transports.

    Args:
        args: as of `WeightUpdater`.
        model: this rank's Megatron model chunks.

    Attributes:
        transports: that are open, together to all engines.
        place: of this rank among those that send; by default the source sends alone.
    """

    def __init__(self, args: Args, model: list[Any]) -> None:
        super().__init__(args, model)
        self.transports: list[Transport] = []
        self.place = StagePlace()

    @abstractmethod
    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Prepare the ways to engines of so many ranks each (collective)."""

    def close(self) -> None:
        """Leave the groups with the engines; another updater takes over (on every rank)."""
        for transport in self.transports:
            transport.close()
        self.transports = []

    def _open_anew(self) -> None:
        self.close()
        self.transports = self.open(self.engine_sizes)

    def _before_next_attempt(self) -> None:
        if any(transport.keeps_order for transport in self.transports):
            self._open_anew()

    def _release(self) -> None:
        for transport in self.transports:
            transport.release()

    def _attempt(self) -> WeightSyncError | None:
        """Send every bucket and compare; all ranks go through all buckets, whatever fails on the way."""
        slots = min(transport.num_slots for transport in self.transports)
        shares_memory = any(transport.shares_memory for transport in self.transports)
        stream, times = None, Timeline()
        if self.is_sender:
            part = f".{self.place.stage}" if self.place.num_stages > 1 else ""
            stream = BucketStream(self.fleet, self._post, version=f"{self.weight_version}{part}", num_slots=slots)
        for number, bucket in enumerate(times.making("tensors", self._buckets())):
            slot = number % slots
            if stream is not None:
                with times.stage("waiting for a buffer"):
                    stream.make_room(slot)
            if shares_memory:
                self._barrier()  # what other ranks prepared there has been loaded as well
            with times.stage("filling buffers"):
                prepared = [transport.prepare(bucket, slot=slot) for transport in self.transports]
            if stream is not None:
                if number == 0:
                    self._await_turn(times)
                with times.stage("handing over"):
                    stream.send(prepared, slot)
        if stream is not None:
            with times.stage("last answers"):
                stream.finish()
            self._end_turn()
        error = self._of_all_senders(stream.error if stream is not None else None)
        if self.is_source and error is None:
            with times.stage("comparison"):
                error = self._compare()
        if stream is not None:
            self._tell(times, stream)
        return error

    # ---- several ranks that send, one after the other

    def _await_turn(self, times: Timeline) -> None:
        """Wait until this sender may hand over."""
        if self.place.sender_before is not None:
            with times.stage("waiting for other stages"):
                dist.recv(torch.zeros(1), src=self.place.sender_before, group=get_gloo_group())

    def _end_turn(self) -> None:
        """Let the next one do so."""
        if self.place.sender_after is not None:
            dist.send(torch.zeros(1), dst=self.place.sender_after, group=get_gloo_group())

    def _of_all_senders(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """On the source rank the first error of a sender; what they sent is noted there (collective)."""
        if self.place.num_stages == 1:
            return error
        parts = gathered((error, self.checks.sent.on_host()) if self.is_sender else None)
        if not self.is_source:
            return None
        for failed, sent in filter(None, parts[1:]):
            error = error or failed
            self.checks.sent.add(sent)
        return error

    def _tell(self, times: Timeline, stream: BucketStream) -> None:
        """One line that says where the time of an attempt went."""
        parts = [str(times), *filter(None, (transport.timings() for transport in self.transports))]
        if answers := stream.answer_times:
            parts.append(f"answers after {sum(answers) / len(answers):.4f}, the slowest {max(answers):.4f}")
        size = f"{len(answers)} buckets, {self.checks.sent.num_bytes / 1e9:.3f} GB"
        logger.info("weight sync %d, %s; seconds: %s", self.weight_version, size, "; ".join(parts))

    def _post(self, prepared: list[Any], version: str) -> Posted:
        """Hand a bucket to all engines, each over its transport."""
        parts = [
            transport.post(part, version=version) for transport, part in zip(self.transports, prepared, strict=True)
        ]
        calls = {number: call for part in parts for number, call in part.calls.items()}

        def finish() -> None:
            for part in parts:
                part.finish()

        return Posted(calls, finish)
