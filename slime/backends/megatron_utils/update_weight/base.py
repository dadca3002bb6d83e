"""What every weight sync has in common: pause, flush, send, compare, continue; and sending bucket by bucket.

How a bucket travels is the business of transports; which tensors there are and their HF names is the iterator's.

Nothing may be lost on the way without notice. Four checks, none of which reads the weights as a whole:
1. Every bucket is sent as version "v.i". SGLang sets a version only after it has loaded the bucket, and says so in its
   answer; a bucket that never reached an engine is not confirmed. The version "v" itself is set when all are confirmed
   and nothing was missing, and is read back.
2. The names sent, over all buckets, must be those of the HF checkpoint that the engines were started from. A bucket
   that never reached the sender, or a parameter without a conversion rule, is missing there.
3. The bytes sent must be those of the first sync: a later one cannot quietly shrink.
4. A few elements of a few tensors are compared with what the engines hold afterwards (`spot_check`).
What they cannot see, an engine that loads another tensor into the wrong place, shows with --check-weight-update-equal
and in `train/train_rollout_logprob_abs_diff`.

A sync that fails is sent once more as a whole, while the engines stay paused. If that fails too, they are left paused:
an engine never serves weights of which only a part is new. The same version may then be sent to other engines, or by
an updater of another kind.

Wait graph of `update`, on every trainer rank:
    consumes     the model's current parameters
    waits for    each other (the iterator gathers over TP; a barrier at both ends), rank 0 also for the engines
    unblocks     the driver, which starts no request before it returns; with --update-weights-in-flight also the
                 requests that the engines have put aside
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.bucket_stream import BucketStream, check_versions
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, NoLinkError, WeightSyncError, reach
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
from slime.backends.megatron_utils.update_weight.spot_check import SpotCheck
from slime.backends.megatron_utils.update_weight.timeline import Timeline
from slime.backends.megatron_utils.update_weight.transport import Bucket, Posted, Transport
from slime.config.args import Args
from slime.utils.distributed_utils import barrier, gathered
from slime.weights.names import expected_hf_names

__all__ = ["Bucket", "EngineFleet", "NoLinkError", "Posted", "Transport", "WeightSyncError", "WeightUpdater"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
T = TypeVar("T")


@dataclass
class _Sent:
    """What went through one attempt."""

    names: set[str] = field(default_factory=set)
    num_bytes: int = 0

    def add(self, bucket: Bucket) -> None:
        """Note a bucket."""
        self.names |= {name for name, _ in bucket}
        self.num_bytes += sum(tensor.nbytes for _, tensor in bucket)


class WeightUpdater(ABC):
    """Sends the weights of a trainer to its engines; every rank calls every method.

    The source rank pauses the engines, compares, and sets versions. As a rule it alone sends buckets, too.

    Args:
        args: reads `update_weight_buffer_size`, `update_weights_in_flight`, `distributed_timeout_minutes`,
            `hf_checkpoint`, `check_weight_update_equal`.
        model: this rank's Megatron model chunks.

    Attributes:
        weight_version: of the last sync; another trainer of this run may have done it.
        engines: as given to `connect`. engine_sizes: likewise.
    """

    def __init__(self, args: Args, model: list[Any]) -> None:
        self.args = args
        self.model = model
        self.weight_version = 0
        self.deadline_s = args.distributed_timeout_minutes * 60.0
        self.transports: list[Transport] = []
        self.engines: list[Any] = []
        self.engine_sizes: list[int] = []
        self._fleet: EngineFleet | None = None
        self._expected = expected_hf_names(Path(args.hf_checkpoint), args.mtp_num_layers or 0)
        self._spot_check = SpotCheck(self._expected)
        self._bytes_of_first_sync: int | None = None
        self._sent = _Sent()

    @property
    def is_source(self) -> bool:
        """Whether this rank leads: the first of all, which is TP rank 0 of DP rank 0 of the first pipeline stage."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def fleet(self) -> EngineFleet:
        """The connected engines (on ranks that send)."""
        assert self._fleet is not None, "connect the engines before the first update"
        return self._fleet

    def connect(self, engines: Sequence[Any], *, engine_sizes: Sequence[int]) -> None:
        """Take over the engines.

        Args:
            engines: Ray actor handles (or objects) with the methods of `EngineClient`.
            engine_sizes: ranks of each: tensor times pipeline parallel.
        """
        self.engines, self.engine_sizes = list(engines), list(engine_sizes)
        if self.is_sender:
            self._fleet = EngineFleet(reach(engines, deadline_s=self.deadline_s), deadline_s=self.deadline_s)
        self._open_anew()
        self._barrier()

    def update(self) -> dict[str, float]:
        """Send the current weights as the next version.

        Returns:
            seconds: `perf/update_weights_time`, and of it `perf/update_weights_pause_time` (pause and flush) and
            `perf/update_weights_send_time` (everything up to the comparison, without what lets engines go on); and
            what a transport adds.

        Raises:
            WeightSyncError: an engine failed, or the checks of this module's docstring did not hold. The next call
                sends the same version.
        """
        self.weight_version += 1
        try:
            return self._update()
        except BaseException:
            self.weight_version -= 1
            raise

    def _update(self) -> dict[str, float]:
        start = time.monotonic()
        self._barrier()
        self._prepare()
        prepared = time.monotonic()
        self._by_source(self._pause)
        paused = time.monotonic()
        self._send_until_equal()
        sent = time.monotonic()
        continuing = self.fleet.start("continue_generation") if self.is_source else {}
        self._release()  # meanwhile: the engines have let go of everything that they confirmed
        self._by_source(lambda: self.fleet.wait(continuing, "continuing generation"))
        self._barrier()
        end = time.monotonic()
        if self.is_source:
            stages = (self.weight_version, paused - prepared, sent - paused, end - sent)
            logger.info("weight sync %d: pause and flush %.3f s, send and compare %.3f s, continue %.3f s", *stages)
        return {
            "perf/update_weights_time": end - start,
            "perf/update_weights_pause_time": paused - prepared,
            "perf/update_weights_send_time": sent - paused,
            **self._more_metrics(),
        }

    def is_answered(self) -> bool:
        """Whether every engine answers, scheduler included (collective)."""
        error = None
        if self.is_source:
            try:
                self.fleet.call("check_scheduler", what="saying that they are there")
            except WeightSyncError as failed:
                error = failed
        return self._from_source(error) is None

    def close(self) -> None:
        """Leave the groups with the engines; another updater takes over (on every rank)."""
        for transport in self.transports:
            transport.close()
        self.transports = []

    def _open_anew(self) -> None:
        """Open the ways to the engines, in the place of those that there are (collective)."""
        self.close()
        self.transports = self.open(self.engine_sizes)

    @abstractmethod
    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Prepare the ways to engines of so many ranks each (collective)."""

    def _prepare(self) -> None:  # noqa: B027 - most can do nothing then
        """Do what can be done while the engines still generate (collective)."""

    def _release(self) -> None:
        """Give up what was needed for this sync alone."""
        for transport in self.transports:
            transport.release()

    def _more_metrics(self) -> dict[str, float]:
        """Of the last sync."""
        return {}

    def _pause(self) -> None:
        """Stop the engines, and have them forget what they cached with the old weights.

        With --update-weights-in-flight they put requests aside and compute them anew afterwards. SGLang refuses to
        flush meanwhile; there is nothing to flush, for these engines run without a prefix cache.
        """
        if self.args.update_weights_in_flight:
            self.fleet.call("pause", "retract", what="pausing generation")
            return
        self.fleet.call("pause", "abort", what="pausing generation")
        self.fleet.call("flush_cache", what="flushing the prefix cache")

    def _send_until_equal(self) -> None:
        """Send everything, once more if that fails; every rank raises the same error."""
        for attempt in range(MAX_ATTEMPTS):
            error = self._from_source(self._attempt())
            if error is None:
                return
            if error.is_final or attempt + 1 == MAX_ATTEMPTS:
                raise self._given_up(error)
            if self.is_source:
                logger.warning("weight sync %d failed, it is sent whole once more: %s", self.weight_version, error)
            if any(transport.keeps_order for transport in self.transports):
                self._open_anew()

    def _attempt(self) -> WeightSyncError | None:
        """Send every bucket and compare; all ranks go through all buckets, whatever fails on the way."""
        slots = min(transport.num_slots for transport in self.transports)
        shares_memory = any(transport.shares_memory for transport in self.transports)
        stream, times = None, Timeline()
        if self.is_sender:
            stream = BucketStream(self.fleet, self._post, version=self._part_version(), num_slots=slots)
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

    # ---- what is otherwise where several ranks send

    @property
    def is_sender(self) -> bool:
        """Whether this rank hands buckets to engines."""
        return self.is_source

    def _iterate(self) -> Iterator[Bucket]:
        """What this rank sends, or helps to gather."""
        return iter_hf_buckets(self.args, self.model, buffer_size=self.args.update_weight_buffer_size)

    def _part_version(self) -> str:
        """What the versions of this sender's buckets begin with."""
        return str(self.weight_version)

    def _await_turn(self, times: Timeline) -> None:  # noqa: B027 - one sender waits for nobody
        """Wait until this sender may hand over."""

    def _end_turn(self) -> None:  # noqa: B027
        """Let the next one do so."""

    def _of_all_senders(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """On the source rank the first error of a sender; what they sent is noted there (collective)."""
        return error

    # ----

    def _tell(self, times: Timeline, stream: BucketStream) -> None:
        """One line that says where the time of an attempt went."""
        parts = [str(times), *filter(None, (transport.timings() for transport in self.transports))]
        answers = stream.answer_times()
        if answers:
            parts.append(f"answers after {sum(answers) / len(answers):.4f}, the slowest {max(answers):.4f}")
        size = f"{len(answers)} buckets, {self._sent.num_bytes / 1e9:.3f} GB"
        logger.info("weight sync %d, %s; seconds: %s", self.weight_version, size, "; ".join(parts))

    def _buckets(self) -> Iterator[Bucket]:
        """All buckets (collective); a sender notes what goes through it, for `_compare`."""
        self._sent = _Sent()
        self._spot_check.begin()
        for bucket in self._iterate():
            if self.is_sender:
                self._spot_check.look_at(bucket)
                self._sent.add(bucket)
            yield bucket

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

    def _compare(self) -> WeightSyncError | None:
        """The checks after the last bucket, and the version that says that there are no more."""
        version = str(self.weight_version)
        try:
            self._check_complete(self._sent)
            naming = self.fleet.start("set_weight_version", version)
            held = self._spot_check.ask(self.fleet)
            found = self.fleet.wait(naming, "setting the weight version")
            check_versions(self.fleet, dict(zip(naming, found, strict=True)), version)
            self._spot_check.compare(self.fleet, held)
            if self.weight_version == 1 and self.args.check_weight_update_equal:
                self.fleet.call("check_weights", "compare", what="--check-weight-update-equal")
                logger.info("--check-weight-update-equal: the engines hold the weights of --hf-checkpoint again")
        except WeightSyncError as error:
            return error
        return None

    def _check_complete(self, sent: _Sent) -> None:
        missing = sorted(self._expected - sent.names)
        if missing:
            raise WeightSyncError(
                f"weight sync {self.weight_version} sent {len(sent.names)} tensors; {len(missing)} of "
                f"{self.args.hf_checkpoint} were not among them: {', '.join(missing[:5])}",
                is_final=True,
            )
        if self._bytes_of_first_sync is None:
            self._bytes_of_first_sync = sent.num_bytes
        if sent.num_bytes != self._bytes_of_first_sync:
            raise WeightSyncError(
                f"weight sync {self.weight_version} sent {sent.num_bytes} bytes, the first one "
                f"{self._bytes_of_first_sync}",
                is_final=True,
            )

    def _given_up(self, error: WeightSyncError) -> WeightSyncError:
        """What ends the run; the engines stay paused, for they may hold a part of the new weights."""
        if error.is_final:
            return error
        return WeightSyncError(
            f"weight sync {self.weight_version} failed {MAX_ATTEMPTS} times; what it sent is not to be served, so the "
            f"engines stay paused: {error}",
            silent=error.silent,
        )

    def _by_source(self, action: Callable[[], Any]) -> None:
        """Have the source rank tell the engines something; where one fails, every rank raises it (collective)."""
        error = None
        if self.is_source:
            try:
                action()
            except WeightSyncError as failed:
                error = failed
        if error := self._from_source(error):
            raise error

    def _from_source(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """The source rank's error, on every rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return error
        from slime.utils.distributed_utils import get_gloo_group

        told = [None if error is None else (str(error), error.is_final, error.silent)]
        try:
            dist.broadcast_object_list(told, src=0, group=get_gloo_group())
        except RuntimeError as late:
            if "Timed out" not in str(late):  # the source is gone, which is told of it
                raise
            raise WeightSyncError(
                f"weight sync {self.weight_version}: rank {dist.get_rank()} waited {self.deadline_s:.0f} s for rank 0"
                ", which hands the weights to the engines; if that takes longer, raise --distributed-timeout-minutes",
                is_final=True,
            ) from late
        if error is not None or told[0] is None:
            return error
        message, is_final, silent = told[0]
        return WeightSyncError(message, is_final=is_final, silent=silent)

    def _together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; where a group cannot be formed on one, every rank raises it (collective)."""
        result, told = None, None
        try:
            result = action()
        except NoLinkError as error:
            told = (str(error), error.silent)
        found = next(filter(None, gathered(told)), None)
        if found is not None:
            raise NoLinkError(found[0], silent=found[1])
        return cast(T, result)

    def _barrier(self) -> None:
        """All ranks together, with a deadline that names the laggard instead of the default's half hour."""
        barrier("its part of the weight sync", self.deadline_s)
