"""Named timers of one process, and what is left of a step's time after them (`StepTimes`).

A timer reads the host's clock, or the device's where work is only queued: a CUDA kernel runs after the call that
queued it has returned, so the host's clock says when work was queued, not what it took. `Timer().use(CudaClock())`
marks start and end on the device's own timeline instead. A mark costs the host microseconds and waits for nothing;
`log_dict` reads all of them, and is the one moment at which the host waits.

    perf/step_time = generation + log-prob passes + training (of actor and critic) + perf/other_time

`perf/other_time` holds what a run does around its work: preparing and moving data, sleeping and waking up, the weight
sync, saving, evaluating.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from slime.utils.misc import SingletonMeta

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """What a timer reads: `mark` at its start and end, `seconds` between the two marks when its sum is asked for."""

    def mark(self) -> Any:
        """This moment; must not wait."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to a later one; may wait until the later one is reached."""


class HostClock:
    """The clock of the host."""

    def mark(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Their difference."""
        return end - start


class CudaClock:
    """Moments of the current CUDA stream: a mark is reached when everything queued before it is done.

    Timers that follow each other share the time of the device without gaps: work that is still running when one is
    started counts for the one in which it was queued. Marks live outside torch's allocator, so memory that is given
    away and taken back between two of them (sleep and wake-up) does not touch them. Other streams count as far as the
    current one waits for them.
    """

    def mark(self) -> Any:
        """An event in the current stream."""
        import torch  # here, because this module is also read where torch is not needed

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000  # milliseconds


class Timer(metaclass=SingletonMeta):
    """The one table of timers of a process: `Timer()` always returns the same object.

    Timers of different names may contain each other. One that is started again adds to its sum.

    Example:
        >>> Timer().reset()
        >>> with timer("train"):
        ...     pass
        >>> sorted(Timer().log_dict())
        ['train']
    """

    def __init__(self) -> None:
        self._clock: Clock = HostClock()
        self._seconds: dict[str, float] = {}
        self._started: dict[str, tuple[Clock, Any]] = {}
        self._ended: list[
            tuple[str, Clock, Any, Any]
        ] = []  # Name, clock, start and end of what is not in the sums yet

    def use(self, clock: Clock) -> None:
        """Read `clock` from now on; timers that run go on with the one they were started with."""
        self._clock = clock

    def start(self, name: str) -> None:
        """Start `name`; a name that already runs is a programming error."""
        if name in self._started:
            raise ValueError(f"timer {name!r} is already running; end it before starting it again")
        self._started[name] = self._clock, self._clock.mark()

    def end(self, name: str) -> None:
        """End `name`; what it took is added to its sum."""
        if name not in self._started:
            raise ValueError(f"timer {name!r} is not running; start it first")
        clock, start = self._started.pop(name)
        self._ended.append((name, clock, start, clock.mark()))

    def add(self, name: str, elapsed_time: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_time

    def is_running(self, name: str) -> bool:
        """Whether `name` was started and not ended."""
        return name in self._started

    def log_dict(self) -> dict[str, float]:
        """Seconds per name summed since the last reset (a copy); on CUDA it waits for the device."""
        ended, self._ended = self._ended, []
        for name, clock, start, end in ended:
            self.add(name, clock.seconds(start, end))
        return dict(self._seconds)

    def reset(self, name: str | None = None) -> None:
        """Forget the sum of `name`, or of every name; timers that run go on running."""
        if name is None:
            self._seconds.clear()
            self._ended.clear()
        else:
            self._seconds.pop(name, None)
            self._ended = [ended for ended in self._ended if ended[0] != name]

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Time a block; the time counts also when the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


@overload
def timer(name_or_func: str) -> Any: ...
@overload
def timer(name_or_func: Callable[P, R]) -> Callable[P, R]: ...
def timer(name_or_func: str | Callable[..., Any]) -> Any:
    """`with timer("name"):`, `@timer` (named after the function) or `@timer("name")`."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)  # a contextmanager object is a decorator, too
    return Timer().context(name_or_func.__name__)(name_or_func)


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop the running timer `name` for the length of a block, then start it again: for "time spent waiting" sums."""
    if Timer().is_running(name):
        Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred_func: Callable[[], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: call `deferred_func()` after the function returned or raised."""

    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return func(*args, **kwargs)
            finally:
                deferred_func()

        return wrapped

    return decorate


# Timers of the computation.
PASSES = ("log_probs", "ref_log_probs", "teacher_log_probs", "critic_values", "actor_train", "critic_train")
MetricRecord = tuple[dict[str, float], str]


ALONE = ("log_probs", "ref_log_probs", "teacher_log_probs", "critic_values", "data_preprocess")
"""Timers in which a data-parallel rank waits for no other; in a train step the fast ones wait for the slowest."""
LEAST_S = 1.0


def with_slowest_rank(per_rank: Sequence[list[MetricRecord]]) -> list[MetricRecord]:
    """Return rank 0's records with `perf/slowest_rank_ratio`: the slowest rank's time over the median of all.

    It counts passes in which no rank waits for another, and is left out where these take less than a second.

    Args:
        per_rank: the records of each rank; the first has its times.
    """
    records = per_rank[0]
    seconds = [sum(rank[0][0].get(f"perf/{name}_time", 0.0) for name in ALONE) for rank in per_rank if rank]
    if len(seconds) < 2 or (usual := statistics.median_low(seconds)) < LEAST_S:
        return records
    (first, step_key), *rest = records
    return [({**first, "perf/slowest_rank_ratio": max(seconds) / usual}, step_key), *rest]


class StepTimes:
    """Follows the driver through its steps."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._generation_s = 0.0

    def waited(self, seconds: float) -> None:
        """The driver had nothing to do but to wait for a rollout that is being generated."""
        self._waited_s += seconds

    def generated(self, records: Iterable[MetricRecord]) -> None:
        """A rollout's wait is over.

        Args:
            records: metrics of its generation. Of a rollout that was generated ahead, only what the driver waited for
                counts; of one that it waited for, only the generation and not what the manager did after it.
        """
        took = _joined(records).get("perf/rollout_time", self._waited_s)
        self._generation_s += min(took, self._waited_s)
        self._waited_s = 0.0

    def trained(self, records: Iterable[MetricRecord]) -> dict[str, float]:
        """A step's training is over.

        Args:
            records: metrics of its training.

        Returns:
            `perf/other_time` in seconds; nothing where the step was not timed.
        """
        metrics, generation_s, self._generation_s = _joined(records), self._generation_s, 0.0
        if "perf/step_time" not in metrics:
            return {}
        computation_s = sum(metrics.get(f"perf/{name}_time", 0.0) for name in PASSES)
        return {"perf/other_time": metrics["perf/step_time"] - generation_s - computation_s}


def _joined(records: Iterable[MetricRecord]) -> Mapping[str, float]:
    return {name: value for metrics, _ in records for name, value in metrics.items()}
