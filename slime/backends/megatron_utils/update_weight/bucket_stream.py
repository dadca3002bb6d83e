"""One attempt to send buckets, as a rank that sends sees it: which are on their way, and what has been confirmed.

Each bucket is posted as soon as it is ready, under a version of its own. At most as many are under way as the
transports have slots: one is loaded while the next is made ready. The sync's own version is none of its business: that
is set when `finish` has seen every bucket confirmed. After a failure nothing more is posted; the other ranks still go
through all buckets, so this one has to as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils.update_weight.engines import EngineFleet, WeightSyncError, contact_of
from slime.backends.megatron_utils.update_weight.transport import Posted
from slime.utils.progress_counts import went_on

Post = Callable[[Any, str], Posted]
"""(a prepared bucket, its version) -> what was handed to the engines."""


@dataclass
class _UnderWay:
    """A bucket that the engines are loading."""

    slot: int
    version: str
    posted: Posted


class BucketStream:
    """The buckets of one attempt.

    Args:
        fleet: every engine that must confirm each bucket.
        post: hands a bucket over.
        version: of the sync, or of one rank's part of it.
        num_slots: buckets that may be under way at once.

    Attributes:
        error: the first failure.
    """

    def __init__(self, fleet: EngineFleet, post: Post, *, version: int | str, num_slots: int) -> None:
        self._fleet = fleet
        self._post = post
        self._version = version
        self._num_slots = num_slots
        self._under_way: list[_UnderWay] = []
        self._num_posted = 0
        self._answer_times: list[float] = []
        self.error: WeightSyncError | None = None

    def answer_times(self) -> list[float]:
        """Seconds from posting each bucket to its last answer, which may have waited for those of earlier ones."""
        return list(self._answer_times)

    def make_room(self, slot: int) -> None:
        """Wait until `slot` is free."""
        self._unless_failed(lambda: self._wait_while(lambda one: one.slot == slot))

    def send(self, prepared: Any, slot: int) -> None:
        """Post the next bucket as version "v.i"."""
        self._unless_failed(lambda: self._post_one(prepared, slot))

    def finish(self) -> None:
        """Wait until everything is confirmed."""
        self._unless_failed(lambda: self._wait_while(lambda one: True))
        for left in self._under_way:  # after a failure: the next attempt must not write where engines still read
            with suppress(WeightSyncError):
                self._fleet.wait(left.posted.calls, f"the load of weights {left.version}")

    def _unless_failed(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except WeightSyncError as error:
                self.error = error

    def _post_one(self, prepared: Any, slot: int) -> None:
        if len(self._under_way) == self._num_slots:
            self._confirm_first()
        version = f"{self._version}.{self._num_posted}"
        begin = time.monotonic()
        posted = self._post(prepared, version)
        self._under_way.append(_UnderWay(slot, version, posted))
        index, self._num_posted = self._num_posted, self._num_posted + 1
        self._answer_times.append(0.0)

        def note(_: Any) -> None:
            self._answer_times[index] = time.monotonic() - begin

        for call in posted.calls.values():
            call.add_done_callback(note)

    def _wait_while(self, is_in_the_way: Callable[[_UnderWay], bool]) -> None:
        while any(is_in_the_way(one) for one in self._under_way):
            self._confirm_first()

    def _confirm_first(self) -> None:
        first = self._under_way.pop(0)
        answers = self._fleet.wait(first.posted.calls, f"the load of weights {first.version}")
        first.posted.finish()
        check_versions(self._fleet, dict(zip(first.posted.calls, answers, strict=True)), first.version)
        went_on("buckets of weights")


def check_versions(fleet: EngineFleet, found: Mapping[int, Any], version: str) -> None:
    """Raise WeightSyncError unless every engine says that it has this version."""
    wrong = [
        f"{contact_of(engine, number)} is at {found.get(number)}"
        for number, engine in fleet.engines.items()
        if str(found.get(number)) != version
    ]
    if wrong:
        raise WeightSyncError(f"a bucket of weights was lost: not at version {version}: {'; '.join(wrong)}")
