"""What every weight sync has in common: pause, flush, send bucket by bucket, continue, compare.

How a bucket travels is the subclass's business; which tensors there are and their HF names are the iterator's.

Nothing may be lost on the way without notice. Three checks, none of which reads a weight:
1. Every bucket but the last is sent as version "v.i" and the last one as "v". SGLang sets a version only after it has
   loaded the bucket, and the version is read back after each one (one small GET). A bucket that never reached an
   engine leaves its version behind.
2. The names sent, over all buckets, must be those of the HF checkpoint that the engines were started from. A bucket
   that never reached the sender, or a parameter without a conversion rule, is missing there.
3. The bytes sent must be those of the first sync: a later one cannot quietly shrink.
What they cannot see, an engine that loads a tensor into the wrong place, shows in
`train/train_rollout_logprob_abs_diff`.

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
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.hf_weight_iterator import iter_hf_buckets
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, WeightSyncError
from slime.backends.megatron_utils.update_weight.expected_names import expected_hf_names

__all__ = ["EngineFleet", "WeightSyncError", "WeightUpdater"]

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]


class WeightUpdater(ABC):
    """Sends the weights of a trainer to its engines; every rank calls every method, rank 0 alone talks to engines.

    Args:
        args: reads `update_weight_buffer_size`, `update_weights_in_flight`, `distributed_timeout_minutes`,
            `hf_checkpoint`.
        model: this rank's Megatron model chunks.
    """

    def __init__(self, args: Any, model: list[Any]) -> None:
        self.args = args
        self.model = model
        self.weight_version = 0
        self.deadline_s = args.distributed_timeout_minutes * 60.0
        self._fleet: EngineFleet | None = None
        self._expected = expected_hf_names(Path(args.hf_checkpoint), args.mtp_num_layers or 0)
        self._bytes_of_first_sync: int | None = None

    @property
    def is_source(self) -> bool:
        """Whether this rank sends: the first of all, which is TP rank 0 of DP rank 0."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def fleet(self) -> EngineFleet:
        """The connected engines (source rank only)."""
        assert self._fleet is not None, "connect the engines before the first update"
        return self._fleet

    def connect(self, engines: Sequence[Any], *, engine_sizes: Sequence[int]) -> None:
        """Take over the engines.

        Args:
            engines: Ray actor handles (or objects) with the methods of `SGLangEngine`.
            engine_sizes: ranks of each: tensor times pipeline parallel.
        """
        if self.is_source:
            self._fleet = EngineFleet(engines, deadline_s=self.deadline_s)
            self.open(list(engine_sizes))
        self._barrier()

    def update(self) -> dict[str, float]:
        """Send the current weights as the next version.

        Returns:
            `perf/update_weights_time` in seconds.

        Raises:
            WeightSyncError: an engine failed, or the checks of this module's docstring did not hold.
        """
        start = time.monotonic()
        self.weight_version += 1
        self._barrier()
        if self.is_source:
            self._pause()
        paused = time.monotonic()
        self._send_all(iter_hf_buckets(self.args, self.model, buffer_size=self.args.update_weight_buffer_size))
        sent = time.monotonic()
        if self.is_source:
            self.fleet.call("continue_generation", what="continuing generation")
            self._compare_version(str(self.weight_version))
        self._barrier()
        end = time.monotonic()
        if self.is_source:
            stages = (self.weight_version, paused - start, sent - paused, end - sent)
            logger.info("weight sync %d: pause and flush %.3f s, send %.3f s, continue and compare %.3f s", *stages)
        return {"perf/update_weights_time": end - start}

    @abstractmethod
    def open(self, engine_sizes: list[int]) -> None:
        """Prepare the transport to engines of so many ranks each (source rank only)."""

    @abstractmethod
    def send(self, bucket: Bucket, *, version: str) -> None:
        """Send one bucket to every engine and wait until each has loaded it (source rank only)."""

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

    def _send_all(self, buckets: Iterable[Bucket]) -> None:
        """Send every bucket; the sync's own version goes with the last one, so one is always held back."""
        names: list[str] = []
        num_bytes, index = 0, 0
        held: Bucket | None = None
        for bucket in buckets:
            if not self.is_source:
                continue  # takes part in the gathering only
            if held is not None:
                self._send_and_compare(held, f"{self.weight_version}.{index}")
                index += 1
            held = bucket
            names += [name for name, _ in bucket]
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        if not self.is_source:
            return
        if held is not None:
            self._send_and_compare(held, str(self.weight_version))
        self._check_complete(names, num_bytes)

    def _send_and_compare(self, bucket: Bucket, version: str) -> None:
        self.send(bucket, version=version)
        self._compare_version(version)

    def _compare_version(self, version: str) -> None:
        found = self.fleet.call("get_weight_version", what="reading the weight version")
        wrong = {index: answer for index, answer in enumerate(found) if str(answer) != version}
        if wrong:
            raise WeightSyncError(f"a bucket of weights was lost: engines should be at version {version}, not {wrong}")

    def _check_complete(self, names: list[str], num_bytes: int) -> None:
        missing = sorted(self._expected - set(names))
        if missing:
            raise WeightSyncError(
                f"weight sync {self.weight_version} sent {len(set(names))} tensors; {len(missing)} of "
                f"{self.args.hf_checkpoint} were not among them: {', '.join(missing[:5])}"
            )
        if self._bytes_of_first_sync is None:
            self._bytes_of_first_sync = num_bytes
        if num_bytes != self._bytes_of_first_sync:
            raise WeightSyncError(
                f"weight sync {self.weight_version} sent {num_bytes} bytes, the first one {self._bytes_of_first_sync}"
            )

    def _barrier(self) -> None:
        """All ranks together, with a deadline that names the laggard instead of the default's half hour."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            from slime.utils.distributed_utils import get_gloo_group

            dist.monitored_barrier(group=get_gloo_group(), timeout=timedelta(seconds=self.deadline_s))
