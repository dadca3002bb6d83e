"""Write a run's records next to the run: one thread, which nothing of a rollout waits for.

A rollout that ends while another one is being written and a third waits is left out, with a warning; so is one for
which the disk has no room. The thread reads samples that are finished: nobody changes them any more.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path

from slime.checkpoints.rollout_files import (
    DIRECTORY,
    KeepRule,
    forget,
    prune,
    samples_path,
    write_tables,
)
from slime.config.args import Args
from slime.observability.rollout_records.schema import PLAIN, SAMPLES, Placed, sample_tables
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
MOST_AT_ONCE = 2
"""One that is written and one that waits, of rollouts and of evaluations."""


class RecordWriter:
    """The thread of one process.

    Args:
        directory: of the run's records.
        rule: which of them stay.
    """

    def __init__(self, directory: Path, rule: KeepRule) -> None:
        self.directory = directory
        self._rule = rule
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-records")
        self._pending: dict[str, list[Future[None]]] = defaultdict(list)
        self._num_lost = 0
        self._has_warned = False

    def submit(self, kind: str, what: str, write: Callable[[], None]) -> None:
        """Have the thread write something, unless two of the kind are not done yet."""
        self._pending[kind] = [future for future in self._pending[kind] if not future.done()]
        if len(self._pending[kind]) >= MOST_AT_ONCE:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s is not recorded: those before it are still being written to %s; record fewer with "
                    "--rollout-record-fraction",
                    what,
                    self.directory,
                )
            return
        future = self._thread.submit(self._write, write)
        future.add_done_callback(partial(self._report, what))
        self._pending[kind].append(future)

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is written, at most that long."""
        waited = wait([future for futures in self._pending.values() for future in futures], timeout=deadline_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if waited.not_done:
            logger.warning(
                "%d records in %s were not written in %.0f s", len(waited.not_done), self.directory, deadline_s
            )
        if self._num_lost > 1:
            logger.error("%d records of rollouts in all were not written to %s", self._num_lost, self.directory)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:  # on a full disk, too: what goes may make the room
            prune(self.directory, self._rule)

    def _report(self, what: str, future: Future[None]) -> None:
        if future.cancelled() or (error := future.exception()) is None:
            return
        if self._num_lost == 0:
            problem = f"{type(error).__name__}: {error}"
            logger.error("%s is not recorded in %s (%s); the run goes on", what, self.directory, problem)
        self._num_lost += 1


class SampleRecorder:
    """Records the samples of rollouts and evaluations (--keep-rollouts, --rollout-record-fraction).

    Args:
        args: reads `output_dir`, `keep_rollouts`, `rollout_record_fraction` and `reward_key`.
    """

    def __init__(self, args: Args) -> None:
        rule = KeepRule.parse(args.keep_rollouts)
        self._fraction, self._reward_key = args.rollout_record_fraction, args.reward_key
        self._writer = RecordWriter(Path(args.output_dir) / DIRECTORY, rule) if rule.records else None
        self._has_warned = False

    @contextmanager
    def rollout(self, rollout_id: int, samples: Sequence[Sample]) -> Iterator[frozenset[int] | None]:
        """Record a training rollout once the block is over, also where it fails.

        The block is what the trainer waits for: the writing thread would share the interpreter with it.

        Yields:
            `index_of` those that are recorded; None: all of them.
        """
        if self._writer is None:
            yield None
            return
        places = chosen(samples, self._fraction)
        self._forget(self._writer.directory, rollout_id)
        try:
            is_whole = len(places) == len(samples)
            yield None if is_whole else frozenset(index_of(place, samples[place].index) for place in places)
        finally:
            self._submit("rollout", rollout_id, [(place, samples[place], None) for place in places])

    def _forget(self, directory: Path, rollout_id: int) -> None:
        """Not in the thread: trainer ranks may write their files of this rollout before its turn comes."""
        try:
            forget(directory, rollout_id)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("records of an earlier attempt stay in %s (%s); the run goes on", directory, error)

    def evaluation(self, step: int, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Record an evaluation: data set -> its samples."""
        placed: list[Placed] = []
        start = 0
        for dataset, of_set in samples.items():
            placed += [(start + place, of_set[place], dataset) for place in chosen(of_set, self._fraction)]
            start += len(of_set)
        if self._writer is not None and placed:
            self._submit("evaluation", step, placed)

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is written, at most that long."""
        if self._writer is not None:
            self._writer.finish(deadline_s)

    def _submit(self, kind: str, rollout_id: int, placed: list[Placed]) -> None:
        assert self._writer is not None
        path = samples_path(self._writer.directory, rollout_id, evaluation=kind == "evaluation")
        write = partial(write_samples, path, placed, reward_key=self._reward_key)
        self._writer.submit(kind, f"{kind} {rollout_id}", write)


def index_of(place: int, index: object) -> int:
    """Return a sample's index, or its place in the rollout where a hook has left no whole number there."""
    return int(index) if isinstance(index, Integral) else place


def write_samples(path: Path, samples: Sequence[Placed], *, reward_key: str | None) -> None:
    """Write the file of some samples."""
    write_tables(path, SAMPLES, sample_tables(samples, reward_key=reward_key), plain=PLAIN)


def chosen(samples: Sequence[Sample], fraction: float) -> list[int]:
    """Return the places of the samples that are recorded: whole groups, the same ones of the same prompts each time.

    Args:
        samples: of a rollout; one without a `group_index` is a group of its own.
        fraction: share of the groups, rounded up.
    """
    if fraction >= 1:
        return list(range(len(samples)))
    groups: dict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        groups[f"alone {place}" if sample.group_index is None else str(sample.group_index)].append(place)
    by_hash = sorted(groups, key=lambda group: zlib.crc32(group.encode()))
    return sorted(place for group in by_hash[: math.ceil(fraction * len(groups))] for place in groups[group])
