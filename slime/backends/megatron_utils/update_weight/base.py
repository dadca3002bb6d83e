"""What every weight sync has in common: pause, flush, send, compare, continue.

`BucketUpdater` sends bucket by bucket, over transports; `DiskWeightUpdater` writes files.

Nothing may be lost on the way without notice. Four checks, none of which reads the weights as a whole:
1. Every bucket is sent as version "v.i". SGLang sets a version only after it has loaded the bucket, and says so in its
   answer; a bucket that never reached an engine is not confirmed. The version "v" itself is set when all are confirmed
   and nothing was missing, and is read back.
2. The names sent, over all buckets, must be those of the HF checkpoint that the engines were started from. A bucket
   that never reached the sender, or a parameter without a conversion rule, is missing there.
3. The bytes sent must be those of the first sync: a later one cannot quietly shrink.
4. A few elements of a few tensors are compared with what the engines hold afterwards.
`SyncChecks` makes them: ranks that send take notes, the source rank asks the engines and compares. What they cannot
see, an engine that loads another tensor into the wrong place, shows with
--check-weight-update-equal and in `train/train_rollout_logprob_abs_diff`.

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
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.buckets import Bucket, check_versions
from slime.backends.megatron_utils.update_weight.engines import (
    Calls,
    EngineFleet,
    NoLinkError,
    WeightSyncError,
    contact_of,
    from_source,
    reach,
)
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
from slime.backends.sglang_utils.weight_transfer import agrees, on_host, sample
from slime.config.args import Args
from slime.config.sglang.drafts import draft_with_own_layer
from slime.utils.distributed_utils import barrier
from slime.utils.misc import on_error
from slime.weights.names import expected_hf_names

__all__ = ["NoLinkError", "WeightSyncError", "WeightUpdater"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
NUM_TENSORS = 8
DRAFT = "draft."
"""What SGLang puts in front of a tensor's name in the model with which an engine drafts."""
# SGLang fuses these, so that it has no tensor under their names.
FUSED = re.compile(r"\.(q|k|v|gate|up|q_a|kv_a)_proj\b|_proj_with_mqa|\.experts\.")


class WeightUpdater(ABC):
    """Sends the weights of a trainer to its engines; every rank calls every method.

    The source rank pauses the engines, compares, and sets versions. As a rule it alone sends, too.

    Args:
        args: reads `update_weight_buffer_size`, `update_weights_in_flight`, `distributed_timeout_minutes`,
            `hf_checkpoint`, `check_weight_update_equal`.
        model: this rank's Megatron model chunks, or the `WeightSource` of another backend.

    Attributes:
        is_over_files: weights go over files, which need no link between trainer and engines.
        weight_version: of the last sync; another trainer of this run may have done it.
        checks: see that nothing is lost.
        engines: as given to `connect`. engine_sizes: likewise.
    """

    is_over_files = False

    def __init__(self, args: Args, model: Any) -> None:
        self.args = args
        self.model = model
        self.weight_version = 0
        self.deadline_s = args.distributed_timeout_minutes * 60.0
        with_tower = args.train_backend == "fsdp" or bool(args.multimodal_keys)  # else Megatron's model has none
        num_predictions, may_draft = (
            args.mtp_num_layers or 0,
            draft_with_own_layer(vars(args).get("engine_models", ())),
        )
        self.checks = SyncChecks(args.hf_checkpoint, num_predictions, with_tower=with_tower, may_draft=may_draft)
        self.engines: list[Any] = []
        self.engine_sizes: list[int] = []
        self._fleet: EngineFleet | None = None

    @property
    def is_source(self) -> bool:
        """Whether this rank leads: the first of all, which is TP rank 0 of DP rank 0 of the first pipeline stage."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def is_sender(self) -> bool:
        """Whether this rank hands weights to engines."""
        return self.is_source

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
        with on_error(self._take_version_back):
            return self._update()

    def _take_version_back(self) -> None:
        self.weight_version -= 1

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

    def close(self) -> None:  # noqa: B027
        """Leave the ways to the engines; another updater takes over (on every rank)."""

    # ---- what kinds of updaters do in their own way

    @abstractmethod
    def _open_anew(self) -> None:
        """Open the ways to the engines, in the place of those that there are (collective)."""

    def _prepare(self) -> None:  # noqa: B027 - most can do nothing then
        """Do what can be done while the engines still generate (collective)."""

    @abstractmethod
    def _attempt(self) -> WeightSyncError | None:
        """Send everything and compare; all ranks go through all buckets, whatever fails on the way.

        Returns:
            the source rank's error, or another rank's of its own.
        """

    def _before_next_attempt(self) -> None:  # noqa: B027
        """Mend what a failed attempt may have left (collective)."""

    def _release(self) -> None:  # noqa: B027
        """Give up what was needed for this sync alone."""

    def _more_metrics(self) -> dict[str, float]:
        """Of the last sync."""
        return {}

    def _iterate(self) -> Iterator[Bucket]:
        """What this rank sends, or helps to gather."""
        return iter_hf_buckets(self.args, self.model, buffer_size=self.args.update_weight_buffer_size)

    # ----

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
            self._before_next_attempt()

    def _buckets(self) -> Iterator[Bucket]:
        """All buckets (collective); a sender notes what goes through it, for `_compare`."""
        self.checks.begin()
        for bucket in self._iterate():
            if self.is_sender:
                self.checks.note(bucket)
            yield bucket

    def _compare(self) -> WeightSyncError | None:
        """The checks after the last bucket, and the version that says that there are no more."""
        try:
            self.checks.compare(self.fleet, self.weight_version)
            if self.weight_version == 1 and self.args.check_weight_update_equal:
                self.fleet.call("check_weights", "compare", what="--check-weight-update-equal")
                logger.info("--check-weight-update-equal: the engines hold the weights of --hf-checkpoint again")
        except WeightSyncError as error:
            return error
        return None

    def _given_up(self, error: WeightSyncError) -> WeightSyncError:
        """What ends the run; the engines stay paused, for they may hold a part of the new weights."""
        if error.is_final:
            return error
        return WeightSyncError(
            f"weight sync {self.weight_version} failed {MAX_ATTEMPTS} times; what it sent is not to be served, so the "
            f"engines stay paused: {error}",
            silent=error.silent,
        )

    def _by_source(self, action: Callable[[], Any], *, also: tuple[type[Exception], ...] = ()) -> None:
        """Have the source rank do something; where it fails, every rank raises its WeightSyncError (collective).

        Args:
            action: what to do.
            also: other errors that say enough to end a sync with their text.
        """
        error = None
        if self.is_source:
            try:
                action()
            except WeightSyncError as failed:
                error = failed
            except also as failed:
                error = WeightSyncError(str(failed), is_final=True)
        if error := self._from_source(error):
            raise error

    def _from_source(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """The source rank's error, on every rank."""
        return from_source(error, version=self.weight_version, deadline_s=self.deadline_s)

    def _barrier(self) -> None:
        """All ranks together, with a deadline that names the laggard instead of the default's half hour."""
        barrier("its part of the weight sync", self.deadline_s)


# ---- that nothing was lost


@dataclass
class Sent:
    """The tensors that one attempt of a sync has sent, from one rank or from several.

    Attributes:
        names: of tensors.
        num_bytes: of all of them.
        samples: name of a chosen tensor -> its shape and a sample of it.
    """

    names: set[str] = field(default_factory=set)
    num_bytes: int = 0
    samples: dict[str, tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=dict)

    def add(self, other: Sent) -> None:
        """Count in what another rank has sent."""
        self.names |= other.names
        self.num_bytes += other.num_bytes
        self.samples |= other.samples

    def on_host(self) -> Sent:
        """The same with samples in the host's memory; the device is waited for once."""
        shapes, samples = zip(*self.samples.values(), strict=True) if self.samples else ((), ())
        held = dict(zip(self.samples, zip(shapes, on_host(samples), strict=True), strict=True))
        return Sent(self.names, self.num_bytes, held)


def choose(names: Iterable[str]) -> set[str]:
    """A handful of tensors, evenly spread over the sorted names of those that engines do not fuse."""
    candidates = sorted(name for name in names if name.endswith("weight") and not FUSED.search(name))
    count = min(NUM_TENSORS, len(candidates))
    return {candidates[i * (len(candidates) - 1) // max(1, count - 1)] for i in range(count)}


class SyncChecks:
    """The checks of each sync of a run.

    Args:
        hf_checkpoint: that the engines were started from.
        num_predictions: layers that predict further tokens in the trainer's model.
        with_tower: the trainer has the part that sees images.
        may_draft: engines draft with a layer of the model, so that those that are sent should be found in them.

    Attributes:
        sent: what went through the present attempt.
    """

    def __init__(
        self, hf_checkpoint: str, num_predictions: int, *, with_tower: bool = False, may_draft: bool = False
    ) -> None:
        self._checkpoint = hf_checkpoint
        self._expected = expected_hf_names(Path(hf_checkpoint), num_predictions, with_tower=with_tower)
        # An engine that drafts with layers of the model holds them in a model of their own.
        self._of_drafts = choose(self._expected - expected_hf_names(Path(hf_checkpoint), with_tower=with_tower))
        self._chosen = choose(self._expected) | self._of_drafts
        self._has_samples = bool(self._chosen)
        self._seeks_drafts = may_draft and bool(self._of_drafts)
        self._bytes_of_first_sync: int | None = None
        self.sent = Sent()

    def begin(self) -> None:
        """Forget the last attempt."""
        self.sent = Sent()

    def note(self, bucket: Bucket) -> None:
        """Note a bucket that is sent, with samples of the chosen tensors in it."""
        self.sent.names |= {name for name, _ in bucket}
        self.sent.num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        self.sent.samples |= {
            name: (tuple(tensor.shape), sample(tensor)) for name, tensor in bucket if name in self._chosen
        }

    def compare(self, fleet: EngineFleet, version: int) -> None:
        """See that everything was sent, set the version that says so, and compare samples.

        Raises:
            WeightSyncError: something is missing, or an engine holds something else.
        """
        self._check_complete(version)
        naming = fleet.start("set_weight_version", str(version))
        asked = fleet.start("sample_weights", sorted(self.sent.samples)) if self._has_samples else {}
        sent = self.sent.on_host() if asked else self.sent  # meanwhile
        found = fleet.wait(naming, "setting the weight version")
        check_versions(fleet, dict(zip(naming, found, strict=True)), str(version))
        if asked:
            self._compare_samples(fleet, asked, sent)

    def _check_complete(self, version: int) -> None:
        missing = sorted(self._expected - self.sent.names)
        if missing:
            raise WeightSyncError(
                f"weight sync {version} sent {len(self.sent.names)} tensors; {len(missing)} of "
                f"{self._checkpoint} were not among them: {', '.join(missing[:5])}",
                is_final=True,
            )
        if self._bytes_of_first_sync is None:
            self._bytes_of_first_sync = self.sent.num_bytes
        if self.sent.num_bytes != self._bytes_of_first_sync:
            raise WeightSyncError(
                f"weight sync {version} sent {self.sent.num_bytes} bytes, the first one {self._bytes_of_first_sync}",
                is_final=True,
            )

    def _compare_samples(self, fleet: EngineFleet, asked: Calls, sent: Sent) -> None:
        num_equal = num_of_drafts = 0
        for number, ranks in zip(asked, fleet.wait(asked, "looking at the engines' weights"), strict=True):
            for answer in ranks or ():
                held = self._comparable(answer)
                verdicts = {name: agrees(*sent.samples[name], held[name]) for name in held}
                wrong = [name for name, verdict in verdicts.items() if verdict is False]
                if wrong:
                    raise WeightSyncError(
                        f"{contact_of(fleet.engines[number], number)} does not hold the weights that it confirmed: "
                        f"{', '.join(wrong)}"
                    )
                num_equal += sum(verdict is True for verdict in verdicts.values())
                num_of_drafts += sum(verdicts.get(name) is True for name in self._of_drafts & _drafted(answer).keys())
        if self._seeks_drafts and not num_of_drafts:
            self._seeks_drafts = False
            logger.warning(
                "no weight of the engines' drafting layer can be looked at: it may hold other ones than sent"
            )
        if not num_equal:
            self._has_samples = False
            logger.warning("no weight of the engines can be looked at: the syncs are checked by version and size only")

    def _comparable(self, answer: Mapping[str, str]) -> dict[str, str]:
        """An engine's answer by HF names; of a model that drafts, where a name may mean another tensor, its layers."""
        of_draft = _drafted(answer)
        own = {name: held for name, held in answer.items() if not name.startswith(DRAFT)}
        return own | {name: held for name, held in of_draft.items() if name in self._of_drafts}


def _drafted(answer: Mapping[str, str]) -> dict[str, str]:
    """What an engine's model that drafts holds, by the names of what was sent."""
    return {name.removeprefix(DRAFT): held for name, held in answer.items() if name.startswith(DRAFT)}
