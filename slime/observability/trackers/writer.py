"""The process that feeds the trackers: `python -m slime.observability.trackers.writer OUTPUT_DIR`.

The driver starts it with `--follow` and says on standard input when the run is over. Without that option it delivers
what is left of a run that has ended, and ends. Each tracker has a thread of its own, which

1. opens the tracker, and goes on with the run of the service that was noted;
2. reads the lines of metrics.jsonl and eval_samples.jsonl behind the noted place, and hands them over;
3. notes the place, some seconds behind: libraries that send by themselves may still have the last lines in memory,
   and write them to a disk that fills up meanwhile;
4. goes back to the noted place, with a new object, where a call fails or exceeds its deadline; then later and later.

So a line is delivered at least once. Nothing waits in memory, and no tracker waits for another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from slime.observability.trackers import (
    DELIVER_S,
    EVAL_SAMPLES_FILE,
    FINISH_S,
    FOLDER,
    KEYS,
    METRICS_FILE,
    RUN_FILE,
    Item,
    Place,
    Step,
    TrackedRun,
    Tracker,
    TrackerRuns,
    count_left,
    end_of_files,
    make_tracker,
    need_room,
    news,
    read_place,
    size_of,
)
from slime.processes.directories import is_claimed
from slime.utils.http.api_keys import HIDDEN

logger = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 5.0  # services show a record some seconds later; each look costs the host a little
ALIVE_S = 2.0
CALL_S = 120.0  # the deadline of one call of a tracker
LONGEST_PAUSE_S = 60.0
CRASHED_S = 5.0  # the same where the driver was killed: soon after that the sweeper kills what is left of a run
BY_HAND_S = 600.0
LAG_S = 10.0  # between handing a line over and noting it
# A record of which a tracker says that it will never take it, however often it is given to it
NEVER = (TypeError, ValueError, LookupError, AttributeError)

Report = Callable[[str, str], None]


class Ending:
    """When the run is over: until when lines may still be delivered, and what is said of the run."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self.until = float("inf")
        self.summary: dict[str, Any] = {}

    def begin(self, within_s: float, summary: Mapping[str, Any]) -> None:
        """The run is over."""
        self.until, self.summary = time.monotonic() + within_s, dict(summary)
        self.is_set.set()


class Lane:
    """Brings the lines of a run to one tracker, and says its first failure and its first recovery.

    Args:
        name: of the tracker.
        run: the run's own facts: `directory`, `args`, `command_line`, `runs`.
        report: takes a kind ("warning", "info") and a sentence.
    """

    def __init__(self, name: str, run: SimpleNamespace, report: Report) -> None:
        self.name, self._run, self._report = name, run, report
        self._place = read_place(run.directory, name) or Place()
        self._noted = replace(self._place)
        self._handed: deque[tuple[float, Place]] = deque()  # (when, the place behind it)
        self._tracker: Tracker | None = None
        self._step = Step("rollout/step", 0, time.time())
        self._answers_seen = -1
        self._num_failures = 0
        self._said: set[str] = set()

    def follow(self, ending: Ending) -> None:
        """Deliver until the run is over and everything is delivered, or there is no more time."""
        while True:
            is_over = ending.is_set.is_set()
            is_done = self.deliver(is_over=is_over)
            if is_over and (is_done or time.monotonic() > ending.until):
                return self._finish(ending.summary)
            pause_s = POLL_S if is_done else min(2.0**self._num_failures / 2, LONGEST_PAUSE_S)
            if is_over:
                time.sleep(min(pause_s, max(ending.until - time.monotonic(), 0.0)))
            else:
                ending.is_set.wait(pause_s)

    def deliver(self, *, is_over: bool = False) -> bool:
        """Hand over what is there; return whether all of it was taken.

        Args:
            is_over: nobody writes to the files any more.
        """
        if self._has_all():  # most looks end here
            self._note(time.monotonic() - LAG_S)
            return True
        # Libraries of others, over a network: whatever they raise, it ends nothing.
        handing = called(lambda: self._open_and_hand_over(is_over))
        if error := handing.exception():
            self._failed(error)
            return False
        self._note(time.monotonic() - LAG_S)
        if self._num_failures:
            self._say("back", "info", f"--tracker {self.name}: it takes records again, also those since it failed")
        self._num_failures = 0
        return handing.result(0)

    def _has_all(self) -> bool:
        """Whether the tracker is open and has every byte of the files, with room to write them."""
        place = self._place
        is_open = self._tracker is not None and not self._num_failures
        if not is_open or end_of_files(self._run.directory) != (place.records, place.answers):
            return False
        with contextlib.suppress(OSError):
            self._need_room()
            return True
        return False

    def _open_and_hand_over(self, is_over: bool) -> bool:
        if self._tracker is None:
            self._open()
        self._need_room()
        return self._hand_over(is_over)

    def _need_room(self) -> None:
        """Check the disk of a library that writes from a thread of its own, which tells nobody of a full one.

        Raises:
            OSError: it is full; what was handed over since the noted place may be lost.
        """
        if (directory := getattr(self._tracker, "directory", None)) is not None:
            need_room(directory)

    def _open(self) -> None:
        run, name = self._run, self.name

        def keep(value: str) -> None:
            self._place.run = self._noted.run = value
            self._write_place()
            run.runs.keep(KEYS.get(name, name), value)

        tracked = TrackedRun(run.directory, self._place.run, keep, run.command_line)
        tracker = make_tracker(name, run.args)
        where = within(CALL_S, lambda: tracker.open(run.config, tracked))
        self._tracker = tracker
        if where:
            self._say("where", "info", f"--tracker {name}: {where}")

    def _hand_over(self, is_over: bool) -> bool:
        directory, place, tracker = self._run.directory, self._place, self._tracker
        assert tracker is not None
        size = size_of(directory / EVAL_SAMPLES_FILE)
        # An evaluation that is being written is not taken in two parts: its file has not grown since the last look.
        is_whole, self._answers_seen = is_over or size == self._answers_seen, size
        for item in news(directory, place, answers_end=size if is_whole else place.answers):
            self._give(tracker, item)
            if item.file == METRICS_FILE:
                place.records = item.end
            else:
                place.answers = item.end
        return is_whole and place.answers >= size and place.records >= size_of(directory / METRICS_FILE)

    def _give(self, tracker: Tracker, item: Item) -> None:
        try:
            self._step = step = item.step(self._step)
            within(CALL_S, lambda: item.hand_to(tracker, step))
        except NEVER as error:
            if isinstance(error, OSError):  # of a request, with an answer that is no JSON
                raise
            self._place.num_refused += 1
            logger.exception("--tracker %s: a line is left out", self.name)
            self._say(
                "refused", "warning", f"--tracker {self.name} cannot take a record ({_text(error)}); it is left out"
            )

    def _failed(self, error: BaseException) -> None:
        self._num_failures += 1
        self._tracker = None
        self._place = replace(self._noted, num_refused=self._place.num_refused)
        self._handed.clear()
        logger.warning("--tracker %s failed %d times", self.name, self._num_failures, exc_info=error)
        self._say(
            "failed",
            "warning",
            f"--tracker {self.name} does not work now ({_text(error)}); the run goes on, and the tracker gets what it "
            "lacks when it works again",
        )

    def _finish(self, summary: Mapping[str, Any]) -> None:
        tracker, refused = self._tracker, self._place.num_refused
        if tracker is not None:
            summary = {**summary, "num_refused": refused}
            ended = called(lambda: self._end(tracker, summary), getattr(tracker, "finish_s", FINISH_S))
            error = ended.exception() if ended.done() else TimeoutError("no answer in time")
            if error is None:
                self._note(float("inf"))
            else:
                self._report("warning", f"--tracker {self.name} did not end well ({_text(error)})")
        if refused:
            self._report("warning", f"--tracker {self.name} lacks {refused} records that it could not take")

    def _end(self, tracker: Tracker, summary: Mapping[str, Any]) -> None:
        tracker.finish(summary)
        self._need_room()

    def _note(self, before_s: float) -> None:
        """Note what was handed over before this moment."""
        place, handed = replace(self._place), self._handed
        if not handed or handed[-1][1] != place:
            handed.append((time.monotonic(), place))
        noted = self._noted
        while handed and handed[0][0] <= before_s:
            noted = handed.popleft()[1]
        if noted != self._noted:
            self._noted = replace(noted, run=self._place.run)
            self._write_place()

    def _write_place(self) -> None:
        try:
            self._noted.write(self._run.directory, self.name)
        except OSError as error:  # after a restart these lines are delivered again
            self._say("note", "warning", f"{self._run.directory / FOLDER} cannot be written ({error})")

    def _say(self, what: str, kind: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._report(kind, text)


def called(function: Callable[[], T], deadline_s: float | None = None) -> Future[T]:
    """Call a function in a thread; the future has its end, unless it takes too long and is left to itself."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(function)
    threads.shutdown(wait=False)
    wait([future], deadline_s)
    return future


def within(deadline_s: float, function: Callable[[], T]) -> T:
    """Return what a function returns.

    Raises:
        TimeoutError: it took longer.
    """
    future = called(function, deadline_s)
    if not future.done():
        raise TimeoutError(f"no answer within {deadline_s:g} s")
    return future.result(0)


def _text(error: BaseException) -> str:
    """One line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def read_run(directory: Path) -> SimpleNamespace:
    """Read what the driver has written of the run.

    Raises:
        OSError: there is no such file.
    """
    said = json.loads((directory / FOLDER / RUN_FILE).read_text())
    flags = {name: None if value == HIDDEN else value for name, value in said["flags"].items()}
    return SimpleNamespace(
        directory=directory,
        config=said["flags"],
        args=SimpleNamespace(**flags),
        command_line=said["command_line"],
        runs=TrackerRuns(said["flags"].get("save"), goes_on=said["is_resumed"]),
        trackers=said["trackers"],
    )


def _listen(ending: Ending) -> None:
    """Wait for the driver's last line; without one it was killed."""
    line = sys.stdin.readline()
    if line.strip():
        ending.begin(DELIVER_S, json.loads(line))
    else:
        ending.begin(CRASHED_S, {"status": "crashed"})


def serve(directory: Path, report: Report, ending: Ending, *, alive: Callable[[], None] = lambda: None) -> None:
    """Feed all trackers of a run until the run is over."""
    run = read_run(directory)
    lanes = [Lane(name, run, report) for name in run.trackers]
    threads = [threading.Thread(target=lane.follow, args=(ending,), name=lane.name, daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            alive()
            thread.join(ALIVE_S)


def _say_to_driver() -> Report:
    """Keep standard output for what the driver is told; what libraries print goes to the log."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def say(kind: str, text: str) -> None:
        with lock, contextlib.suppress(OSError):  # a driver that was killed hears nothing
            pipe.write(json.dumps([kind, text]) + "\n")
            pipe.flush()

    return say


def deliver_the_rest(directory: Path) -> int:
    """Deliver what a run that has ended could not; returns the exit status."""
    if is_claimed(directory):
        sys.stderr.write(f"error: a run writes to {directory} now, and delivers by itself\n")
        return 2
    if not (directory / FOLDER / RUN_FILE).exists():
        sys.stderr.write(f"error: {directory} has no {FOLDER}/{RUN_FILE}: no run with a tracker has written there\n")
        return 2
    ending = Ending()
    ending.begin(BY_HAND_S, {"status": "finished"})
    serve(directory, lambda kind, text: print(f"{kind}: {text}"), ending)
    left = {name: count_left(directory, name) for name in read_run(directory).trackers}
    print("\n".join(f"{name}: {count} lines left" for name, count in left.items()))
    return int(any(left.values()))


def main(arguments: list[str]) -> int:
    """Run as a program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slime.observability.trackers.writer", description=__doc__)
    parser.add_argument("output_dir", type=Path, help="--output-dir of the run")
    parser.add_argument("--follow", action="store_true", help="the driver starts it: deliver until it says the end")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(levelname)s %(name)s: %(message)s")
    if not options.follow:
        return deliver_the_rest(options.output_dir)
    os.nice(5)
    say, ending = _say_to_driver(), Ending()
    threading.Thread(target=_listen, args=(ending,), daemon=True).start()
    serve(options.output_dir, say, ending, alive=lambda: say("alive", ""))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a call that hangs in a library has a thread that the interpreter might wait for
