"""Generation that never pauses: a worker keeps group tasks in flight while the trainer trains and weights are synced.

    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-weight-staleness 2

A rollout is then the next `rollout_batch_size` finished groups that are fresh enough; nothing is aborted at its end.

What becomes of a group whose task ended:
    finished          waits in the worker's queue; a rollout takes the oldest weights first, through the dynamic filter
    too old           its tokens would be more than --max-weight-staleness versions old when trained: its prompt goes
                      back to the data source, afresh
    aborted           by an engine or by a sync that does not keep requests: back to the data source, with
                      --partial-rollout together with what it has
    crashed           tried again --max-group-retries times (never with --on-sample-error drop, nor where an engine
                      refused it), then counted, reported and replaced by a fresh prompt; crash after crash is an error

Wait graph (everything runs on the process's event loop; nothing polls):
    worker            consumes prompts of the data source. A group is begun when there is room for it: `concurrency`
                      in flight, `concurrency` in the queue, and the rollout it would land in, behind all that are
                      ahead of it, is trained no more than --max-weight-staleness versions from now
    `_fill`           begins groups until there is no room. Whatever makes room calls it: a task that ended, a group
                      that was taken, a rollout that ended, a weight sync
    rollout           waits for the worker's queue, with a deadline; a group that it takes unblocks `_fill`
    weight sync       waits for nothing here (with --deterministic for `settle`); unblocks `_fill`
With --deterministic nothing depends on which group ends first: groups are taken in the order in which they were begun,
one that is tried again keeps its place, and a weight sync waits until all that may be begun before it are finished
(`settle`). Which these are follows from the numbers of rollouts, and so does the version that each group is of.

A rollout can always go on: the driver begins it only when its groups may be begun, so with nothing in flight and an
empty queue there is room for at least one.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.prompt_sources import params_of
from slime.processes.progress import progress_bar
from slime.processes.wait import WaitTimeout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collector import Collector
from slime.rollout.eval import eval_rollout
from slime.rollout.hooks.returns import draw_groups, return_groups
from slime.rollout.hooks.sample_errors import SampleError, stray_cancellation
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sampling.generation import GenerateState, generate_and_rm_group, is_unfinished
from slime.rollout.sampling.scoring import restarted
from slime.rollout.sampling.weight_versions import WeightClock, is_too_old, oldest_version
from slime.rollout.sglang_rollout import finish_rollout, restart_stale
from slime.utils import async_utils
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
Group = list[Sample]
NEXT_GROUP_DEADLINE_S = 24 * 3600.0  # a group has no bound of its own; each request inside it has one
STOP_DEADLINE_S = 10.0
_MOST_ABORTS_OF_A_GROUP = 10
_LEAST_CRASHES = 16
_MOST_CRASHES_PER_PROMPT = 4


def generate_rollout_fully_async(
    args: Args, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next rollout_batch_size groups of the background worker, or one evaluation beside it.

    Args:
        args: the flags.
        rollout_id: number of the rollout.
        data_buffer: the data source; until the run ends only this module's worker may draw from it.
        evaluation: evaluate args.eval_datasets instead.

    Raises:
        RuntimeError: the filter drops, engines abort, or groups crash, again and again.
        WaitTimeout: no group was finished for a day.
    """
    if evaluation:
        return async_utils.run(eval_rollout(args, rollout_id))
    worker = Workers().get(args, data_buffer)
    return async_utils.run(collect(worker, rollout_id))


async def collect(worker: AsyncRolloutWorker, rollout_id: int) -> RolloutFnTrainOutput:
    """Take the groups of a rollout from the worker, and give back what it needs no more."""
    args, collector = worker.args, Collector(worker.args, rollout_id)
    trained_at = WeightClock().trained_at(rollout_id)
    worker.begin_rollout(rollout_id)
    worker.launch()
    with progress_bar(args.rollout_batch_size, f"rollout {rollout_id}") as bar:
        while len(collector.accepted) < args.rollout_batch_size:
            finished = await worker.next_group()
            if is_too_old(finished.group, trained_at, args.max_weight_staleness):
                worker.give_back_stale(finished)
            elif collector.offer(finished.group, num_expected=worker.num_expected + 1):
                worker.num_accepted += 1
                bar.update(1)
            worker.fill()
    metrics = worker.end_rollout()
    output = finish_rollout(args, collector, worker.data_buffer)
    return RolloutFnTrainOutput(samples=output.samples, metrics={**(output.metrics or {}), **metrics})


@dataclass
class Flight:
    """A group in flight or finished: `untouched` is as it was when it was begun, `number` counts those begun."""

    group: Group
    untouched: Group
    number: int
    num_crashes: int = 0

    @property
    def age_key(self) -> tuple[int, int]:
        """Sorts the oldest weights first, then the earliest prompt."""
        oldest, index = oldest_version(self.group), self.untouched[0].index
        return (1 << 62 if oldest is None else oldest, -1 if index is None else index)


class AsyncRolloutWorker:
    """Keeps groups in flight on the process's event loop, from `start` to `stop`.

    The four public verbs may be called from any thread but the loop's own; the rest belongs to the loop.

    Args:
        args: the flags.
        data_buffer: the data source.
        concurrency: groups in flight; as many more may wait to be taken.
    """

    def __init__(self, args: Args, data_buffer: Any, concurrency: int = 10) -> None:
        self.args, self.data_buffer, self.concurrency = args, data_buffer, concurrency
        self.num_accepted = 0
        self._is_ordered = bool(args.deterministic)
        self._num_begun = 0
        self._rollout_id = 0
        self._flying: dict[asyncio.Task[Group], Flight] = {}
        self._in_flight: set[int] = set()  # the numbers of those that fly
        self._numbers: list[int] = []  # the same as a heap, which a number that has landed leaves at its top
        self._finished: list[tuple[tuple[int, int], int, Flight]] = []  # a heap: key, when it landed, group
        self._num_finished = 0
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._is_running = False
        self._counts: Counter[str] = Counter()
        self._aborts: Counter[int | None] = Counter()

    # ---- public verbs

    def start(self) -> None:
        """Begin to keep groups in flight; nothing happens when it already does."""

        async def start() -> None:
            self.launch()

        async_utils.run(start())

    def stop(self) -> None:
        """Cancel what is in flight. Finished groups can still be taken."""
        async_utils.run(self.end())

    def get_completed_groups(self, limit: int | None = None) -> list[Group]:
        """Take finished groups, those with the oldest weights first; at once, none where none is there."""

        async def take() -> list[Group]:
            self._raise_error()
            taken: list[Group] = []
            while self._has_next() and (limit is None or len(taken) < limit):
                taken.append(self._pop().group)
            self.fill()
            return taken

        return async_utils.run(take())

    def queue_size(self) -> int:
        """Finished groups that wait to be taken."""
        return len(self._finished)

    # ---- for a rollout

    def launch(self) -> None:
        """As `start`, on the loop."""
        if not self._is_running:
            self._is_running = True
            self._loop = asyncio.get_running_loop()
            WeightClock().listen(self._on_sync)
            self.fill()

    @property
    def num_expected(self) -> int:
        """Groups of the current rollout that are accepted, finished or in flight."""
        return self.num_accepted + len(self._finished) + len(self._flying)

    def begin_rollout(self, rollout_id: int) -> None:
        """Finished groups belong to this rollout from now on."""
        self._rollout_id, self.num_accepted = rollout_id, 0
        self.fill()

    def end_rollout(self) -> dict[str, float]:
        """Finished groups belong to the next rollout from now on; returns what happened during this one."""
        names = ("crashed_groups", "retried_groups", "stale_groups", "aborted_groups")
        metrics = {f"rollout/fully_async/{name}": float(self._counts[name]) for name in names}
        metrics["rollout/fully_async/queue_size"] = float(len(self._finished))
        metrics["rollout/fully_async/in_flight"] = float(len(self._flying))
        if aborted := self._counts["aborted_groups"]:
            metrics["rollout/aborted_ratio"] = aborted / (aborted + self.num_accepted)
        self._counts.clear()
        self.begin_rollout(self._rollout_id + 1)
        return metrics

    async def next_group(self) -> Flight:
        """Wait for a finished group and take it.

        Raises:
            RuntimeError: groups crashed, or were aborted, again and again.
            WaitTimeout: none was finished in time.
        """
        while not self._has_next():
            self._raise_error()
            await self._hear(f"a finished group for rollout {self._rollout_id}")
        self._raise_error()
        return self._pop()

    async def settle(self) -> None:
        """Wait until nothing is in flight and nothing may be begun; an error is left to the rollout that waits."""
        self.fill()
        while self._is_running and self._error is None and self._flying:
            await self._hear("the groups that were begun")

    async def _hear(self, what: str) -> None:
        """Wait until a task has ended or failed."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), NEXT_GROUP_DEADLINE_S)
        except TimeoutError:
            here = f"{what}; {len(self._flying)} groups are in flight"
            raise WaitTimeout(f"waited {NEXT_GROUP_DEADLINE_S:g} s for {here}") from None

    def give_back_stale(self, flight: Flight) -> None:
        """Return a group whose tokens are too old to the data source, afresh."""
        self._counts["stale_groups"] += 1
        return_groups(self.args, self.data_buffer, [[restarted(sample) for sample in flight.untouched]])

    def fill(self) -> None:
        """Begin groups as long as there is room (see the module's docstring)."""
        with self._failing():  # in a user's data source, for example
            while self._is_running and self._error is None and self._has_room():
                set_current_rollout_id(self._landing())
                groups = draw_groups(self.args, self.data_buffer, 1)
                for group in restart_stale(self.args, self._landing(), groups):
                    self._begin(group)

    def outstanding(self) -> list[Group]:
        """The prompts that were drawn and are in no rollout yet, as they were drawn."""
        finished = [flight for _, _, flight in self._finished]
        flights = sorted([*finished, *self._flying.values()], key=lambda flight: flight.age_key[1])
        return [[sample.snapshot() for sample in flight.untouched] for flight in flights]

    # ---- inside

    async def end(self) -> None:
        """As `stop`, for code in the event loop."""
        self._is_running = False
        WeightClock().forget(self._on_sync)
        tasks = list(self._flying)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_DEADLINE_S)

    def _on_sync(self) -> None:
        self._loop.call_soon_threadsafe(self.fill)  # called in the driver's thread

    def _landing(self) -> int:
        """The rollout that the next group to be begun will be part of, when none of those ahead is dropped."""
        return self._rollout_id + self.num_expected // self.args.rollout_batch_size

    def _has_room(self) -> bool:
        if len(self._flying) >= self.concurrency:
            return False
        clock, landing, bound = WeightClock(), self._landing(), self.args.max_weight_staleness
        is_full = len(self._finished) >= self.concurrency
        if clock.schedule is None or clock.version is None:
            return not is_full
        if is_full and not self._is_ordered:  # in order, the versions alone say what is begun
            return False
        return landing < clock.schedule.end and clock.schedule.may_begin(landing, clock.version, bound)

    def _begin(self, group: Group, *, again: Flight | None = None, num_crashes: int = 0) -> None:
        set_current_rollout_id(self._landing())
        number = self._num_begun if again is None else again.number
        self._num_begun += again is None
        flight = Flight(group, [sample.snapshot() for sample in group], number, num_crashes)
        params = params_of(self.args, GenerateState(self.args).sampling_params, group)
        task = asyncio.get_running_loop().create_task(generate_and_rm_group(self.args, group, params))
        self._flying[task] = flight
        if self._is_ordered:
            self._in_flight.add(number)
            heapq.heappush(self._numbers, number)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Group]) -> None:
        flight = self._flying.pop(task)
        self._in_flight.discard(flight.number)
        if task.cancelled() and not self._is_running:
            return
        with self._failing():
            error = stray_cancellation(flight.untouched) if task.cancelled() else task.exception()
            if error is not None:
                self._take_crashed(flight, error)
            elif is_unfinished(self.args, task.result()):
                self._take_aborted(flight, task.result())
            else:
                flight.group = task.result()
                self._finish(flight)
                self._aborts.pop(flight.untouched[0].index, None)
        self.fill()
        self._news.set()

    def _take_crashed(self, flight: Flight, error: BaseException) -> None:
        if not isinstance(error, SampleError):
            raise error
        retries = 0 if self.args.on_sample_error == "drop" or error.is_final else self.args.max_group_retries
        if flight.num_crashes < retries and self._is_running:
            self._counts["retried_groups"] += 1
            logger.warning("try %d of a group crashed and is repeated: %s", flight.num_crashes + 1, error)
            self._begin(flight.untouched, again=flight, num_crashes=flight.num_crashes + 1)
            return
        self._counts["crashed_groups"] += 1
        logger.warning("a group crashed and is replaced by a fresh prompt: %s", error)
        most = max(_LEAST_CRASHES, _MOST_CRASHES_PER_PROMPT * self.args.rollout_batch_size)
        if self._counts["crashed_groups"] > most:
            raise RuntimeError(
                f"{self._counts['crashed_groups']} groups crashed during rollout {self._rollout_id}, each "
                f"{retries + 1} time(s); the last error: {error}"
            ) from error

    def _take_aborted(self, flight: Flight, group: Group) -> None:
        self._counts["aborted_groups"] += 1
        first = flight.untouched[0].index
        self._aborts[first] += 1
        if self._aborts[first] > _MOST_ABORTS_OF_A_GROUP:
            raise RuntimeError(
                f"prompt group {flight.untouched[0].group_index} was aborted {self._aborts[first]} times; see the "
                "engine logs (memory, timeouts), or what the custom generate function sets as status"
            )
        if self._is_ordered and self._is_running:
            self._begin(flight.untouched, again=flight, num_crashes=flight.num_crashes)
            return
        returned = Collector(self.args, self._rollout_id).give_back(group, flight.untouched)
        return_groups(self.args, self.data_buffer, [returned])

    def _has_next(self) -> bool:
        """Whether a group can be taken: in order, only the first of all that were begun."""
        if not self._finished or not self._is_ordered:
            return bool(self._finished)
        while self._numbers and self._numbers[0] not in self._in_flight:
            heapq.heappop(self._numbers)
        return not self._numbers or self._numbers[0] > self._finished[0][2].number

    def _finish(self, flight: Flight) -> None:
        key = (flight.number, 0) if self._is_ordered else flight.age_key
        heapq.heappush(self._finished, (key, self._num_finished, flight))
        self._num_finished += 1

    def _pop(self) -> Flight:
        return heapq.heappop(self._finished)[2]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep what fails inside, in a callback of the loop, for the rollout that waits."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the boundary of a callback: nobody else would get it
            self._error = self._error or error
            self._news.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Workers(metaclass=SingletonMeta):
    """Owner of this process's worker."""

    def __init__(self) -> None:
        self.worker: AsyncRolloutWorker | None = None

    def get(self, args: Args, data_buffer: Any) -> AsyncRolloutWorker:
        """The worker that draws from this data source."""
        if self.worker is not None and self.worker.data_buffer is not data_buffer:
            self.worker.stop()
            self.worker = None
        if self.worker is None:
            concurrency = args.sglang_server_concurrency * get_rollout_num_engines(args)
            self.worker = AsyncRolloutWorker(args, data_buffer, concurrency=concurrency)
        return self.worker


def settle_worker() -> None:
    """Wait until the process's worker, if there is one, has finished all that it may begin with these weights."""
    if (worker := Workers().worker) is not None:
        async_utils.run(worker.settle())


def stop_worker() -> None:
    """End the process's worker, if there is one."""
    if (worker := Workers().worker) is not None:
        worker.stop()


def save_data_source(data_source: Any, rollout_id: int) -> None:
    """Save the data source as it is after this rollout.

    The prompts that a worker has drawn for later rollouts are saved as if they had been given back: a run that is
    resumed begins them again.
    """
    worker = Workers().worker
    if worker is None or worker.data_buffer is not data_source:
        data_source.save(rollout_id)
        return
    if not hasattr(data_source, "buffer"):
        logger.warning("%s has no buffer: a resumed run skips the prompts in flight", type(data_source).__name__)
        data_source.save(rollout_id)
        return
    async_utils.run(_save_with(data_source, worker, rollout_id))


async def _save_with(data_source: Any, worker: AsyncRolloutWorker, rollout_id: int) -> None:
    """On the loop, so that the worker does not draw meanwhile."""
    before = list(data_source.buffer)
    data_source.buffer[:0] = worker.outstanding()
    try:
        data_source.save(rollout_id)
    finally:
        data_source.buffer[:] = before
