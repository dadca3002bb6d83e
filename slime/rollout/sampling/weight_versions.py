"""How old the weights behind a sample are: the clock of weight versions, and arithmetic on `Sample.weight_versions`.

A weight version is the number of weight syncs that were done: 1 after the first one, before any rollout. The driver
tells this process the version after each sync (`WeightClock.publish`) and, once, when syncs will happen
(`WeightClock.follow`), so that it is known in advance at which version a rollout will be trained.

The engine names a version only when it *answers*: tokens of a request that was in flight during a sync are older than
that. So the version at which generating began is noted too (`note_begin`); the smallest entry of `weight_versions` is
then a bound that every token of the sample keeps.

It decides nothing: what is done about old samples, slime.rollout.sglang_rollout and fully_async_rollout decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample


@dataclass(frozen=True)
class SyncSchedule:
    """When the driver syncs the weights: after every rollout whose number + 1 is a multiple of `interval`.

    Attributes:
        first: the first rollout of this process, or of its trainers where lost ones were replaced.
        end: the rollout after the last one.
        interval: rollouts between two syncs.
        version: of the weights that the engines have when `first` begins.
        stops_every: with --deterministic, the periods of rollouts that a run may be resumed behind. What is begun
            behind one has the weights of the sync that follows it, for that is what a resumed run begins with; so a
            run that is never stopped repeats one that was.
    """

    first: int
    end: int
    interval: int = 1
    version: int = 1
    stops_every: tuple[int, ...] = ()

    def version_at(self, rollout_id: int) -> int:
        """The engines' version when this rollout is trained."""
        return self.version + rollout_id // self.interval - self.first // self.interval

    def may_begin(self, rollout_id: int, version: int, bound: int | None) -> bool:
        """Whether a rollout may be begun now.

        Args:
            rollout_id: which.
            version: of the weights that the engines have.
            bound: versions that it may be older when it is trained (--max-weight-staleness); None is any number.
        """
        if bound is not None and self.version_at(rollout_id) - version > bound:
            return False
        before = rollout_id - 1
        while self.stops_every and self.version_at(before + 1) > version:  # its sync is still to come
            if any((before + 1) % period == 0 for period in self.stops_every):
                return False
            before -= 1
        return True


class WeightClock(metaclass=SingletonMeta):
    """What this process knows of weight versions. Until the driver has told, `version` and `schedule` are None."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.schedule: SyncSchedule | None = None
        self._listeners: list[Callable[[], None]] = []

    def follow(self, schedule: SyncSchedule) -> None:
        """Take over when syncs happen."""
        self.schedule = schedule

    def publish(self, version: int) -> None:
        """All engines have this version now. Listeners are called in the caller's thread."""
        self.version = version
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after every sync."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Call it no more."""
        self._listeners = [one for one in self._listeners if one != listener]

    def trained_at(self, rollout_id: int) -> int | None:
        """The version at which a rollout will be trained; None while the schedule is unknown."""
        return None if self.schedule is None else self.schedule.version_at(rollout_id)


def version_number(version: str) -> int | None:
    """The sync that a version stands for: "3" is 3; "3.1", weights 3 half loaded, is still 2; another name is None."""
    whole, dot, part = version.partition(".")
    if not whole.removeprefix("-").isdigit() or (dot and not part.isdigit()):
        return None
    return int(whole) - 1 if dot else int(whole)


def of_earlier_run(versions: Iterable[str], trained_at: int) -> list[str]:
    """The versions of a sample that another process has saved, as this one counts: its own first version is 1.

    Args:
        versions: as the run before has counted them.
        trained_at: the version at which that run trained the rollout that this one goes on behind; it is 0 now, and
            those before it are negative.
    """
    numbers = [(text, version_number(text)) for text in versions]
    return [text if number is None else str(number - trained_at) for text, number in numbers]


def oldest_version(samples: Sample | Iterable[Sample]) -> int | None:
    """A version that no token of the samples is older than; None when none of them names one."""
    samples = [samples] if isinstance(samples, Sample) else samples
    numbers = (version_number(text) for sample in samples for text in sample.weight_versions)
    return min((number for number in numbers if number is not None), default=None)


def note_begin(samples: Iterable[Sample], begun: int | None) -> None:
    """Remember the version at which generating began where the engine's answers name only later ones."""
    if begun is None:
        return
    for sample in samples:
        oldest = oldest_version(sample)
        if sample.response_length and (oldest is None or oldest > begun):
            sample.weight_versions.insert(0, str(begun))


def staleness(samples: Iterable[Sample], trained_at: int | None) -> int:
    """By how many versions the oldest token is older than the trainer; 0 where that is unknown."""
    oldest = oldest_version(samples)
    return 0 if oldest is None or trained_at is None else max(0, trained_at - oldest)


def is_too_old(samples: Iterable[Sample], trained_at: int | None, bound: int | None) -> bool:
    """Whether the samples must not be trained at this version (--max-weight-staleness)."""
    return bound is not None and staleness(samples, trained_at) > bound


def staleness_metrics(samples: Sequence[Sample], trained_at: int | None) -> dict[str, float]:
    """`rollout/weight_staleness/{mean,max}` over the samples that name versions."""
    known = [sample for sample in samples if oldest_version(sample) is not None]
    if trained_at is None or not known:
        return {}
    ages = [staleness([sample], trained_at) for sample in known]
    return {"rollout/weight_staleness/mean": sum(ages) / len(ages), "rollout/weight_staleness/max": float(max(ages))}
