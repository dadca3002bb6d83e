"""A phase in which nothing goes on is noticed after the time that it may be silent for, and reported once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from slime.observability.phases import Phase, Phases, phase
from slime.processes import progress
from slime.ray.supervisor import REPORT, SLOW, RunStalled, StallWatch, Supervisor
from slime.ray.train_actor import CollectiveState
from slime.ray.utils import _interrupt, interrupt_main


class World:
    """A clock that stands still unless it is moved, something that may go on, and what was reported."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.now = 0.0
        self.done: dict[bool, int] = {False: 0, True: 0}
        self.looks: list[bool] = []
        self.stalls: list[tuple[str, float, float]] = []
        self.phases = Phases(lambda: self.now)
        self.watch = StallWatch(
            self.phases, lambda: self._look(False), lambda: self._look(True), self._note, timeout_s=timeout_s
        )

    def _look(self, closely: bool) -> int:
        self.looks.append(closely)
        return self.done[closely]

    def _note(self, found: Phase, limit_s: float) -> None:
        self.stalls.append((found.name, found.silent_s, limit_s))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            self.watch.tick()

    def do(self, name: str, seconds: float) -> None:
        with self.phases.enter(name):
            self.now += seconds


def test_a_phase_is_stalled_after_the_timeout_and_reported_once() -> None:
    world = World()
    with world.phases.enter("train"):
        world.pass_time(9)
        assert not world.stalls
        world.pass_time(30)
    assert world.stalls == [("train", 10.0, 10.0)]


def test_progress_begins_the_time_anew_and_a_second_stall_is_reported_too() -> None:
    world = World()
    with world.phases.enter("generate"):
        for _ in range(5):
            world.pass_time(8)
            world.done[False] += 1
        assert not world.stalls
        world.pass_time(20)
        world.done[False] += 1
        world.pass_time(20)
    assert [name for name, *_ in world.stalls] == ["generate", "generate"]


def test_a_phase_may_be_silent_for_six_times_its_median() -> None:
    world = World()
    for seconds in (4.0, 5.0, 900.0):  # one slow save is no measure
        world.do("save", seconds)
    assert world.phases.limit_s("save", 10.0) == 6 * 5.0
    assert world.phases.limit_s("train", 10.0) == 10.0
    world.do("save", 0.001)  # nothing was due: it says nothing about how long a save takes
    assert world.phases.limit_s("save", 10.0) == 30.0
    with world.phases.enter("save"):
        world.pass_time(29)
        assert not world.stalls
        world.pass_time(1)
    assert len(world.stalls) == 1


def test_engines_are_asked_only_when_a_phase_has_been_silent_for_half_its_time() -> None:
    world = World()
    with world.phases.enter("generate"):
        world.pass_time(4)
        assert world.looks == [False] * 4
        for _ in range(60):  # tokens appear in the engines, and no answer
            world.pass_time(1)
            world.done[True] += 1
    assert True in world.looks and not world.stalls


def test_nothing_is_watched_between_phases_and_starting_has_time() -> None:
    world = World()
    world.pass_time(50)
    with world.phases.enter("start"):
        world.pass_time(SLOW["start"] - 1)
    assert not world.stalls


def test_a_watch_that_cannot_look_takes_that_for_silence() -> None:
    world = World()
    world.done = {}  # a look fails
    with world.phases.enter("train"):
        world.pass_time(12)
    assert len(world.stalls) == 1


def test_an_inner_phase_takes_the_place_of_the_outer_one() -> None:
    class Run:
        phases = Phases()

        @phase("start")
        def start(self) -> list[str | None]:
            return [self._name(), self.sync(), self._name()]

        @phase("sync")
        def sync(self) -> str | None:
            return self._name()

        def _name(self) -> str | None:
            found = self.phases.current()
            return found.name if found else None

    run = Run()
    assert run.start() == ["start", "sync", "start"]
    assert run.phases.current() is None


@pytest.mark.parametrize("on_stall", ["report", "abort"])
def test_a_stalled_run_ends_or_only_reports_as_on_stall_says(
    on_stall: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "_sections", lambda self: {})  # they ask Ray
    guard = Supervisor(Phases(), tmp_path, stall_timeout_s=1.0, on_stall=on_stall)
    try:
        guard.report(Phase("generate", 90.0, 60.0), 60.0)
        assert "in the phase 'generate' for 60 s" in (tmp_path / REPORT).read_text()
        if on_stall == "abort":
            with pytest.raises(RunStalled, match="'generate' for 60 s .* is in .*stall_report.txt"):
                _interrupt.take()
        _interrupt.take()
    finally:
        guard.end(failed=True)  # nothing ends this process any more


def test_a_stalled_run_ends_though_its_report_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REPORT).mkdir()
    guard = Supervisor(Phases(), tmp_path, stall_timeout_s=1.0, on_stall="abort")
    try:
        guard.report(Phase("generate", 90.0, 60.0), 60.0)
        assert "the report cannot be written" in caplog.text
        with pytest.raises(RunStalled):
            _interrupt.take()
    finally:
        guard.end(failed=True)  # nothing ends this process any more


def test_a_stalled_run_ends_the_main_threads_wait() -> None:
    interrupt_main(RunStalled("nothing has gone on"))
    other = threading.Thread(target=_interrupt.take)  # the watchdog waits, too: it is not ended
    other.start()
    other.join(5)
    with pytest.raises(RunStalled, match="nothing has gone on"):
        _interrupt.take()
    _interrupt.take()  # once: what ends the run waits as well


SLEEPER = """
import sys, time
from slime.processes.progress import write_stacks_on_signal
def the_place_where_it_hangs():
    print("ready", flush=True)
    time.sleep(600)
write_stacks_on_signal()
the_place_where_it_hangs()
"""


@pytest.fixture
def sleeper() -> Any:
    command = [sys.executable, "-c", SLEEPER, "--secret", "sesame"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_stopped_process_is_described_with_its_stack_and_without_its_arguments(sleeper: Any) -> None:
    process = psutil.Process(sleeper.pid)
    process.suspend()
    end = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
        time.sleep(0.01)
    text = progress.describe([sleeper.pid])
    assert "state stopped" in text and "the_place_where_it_hangs" in text
    assert "sesame" not in text


def test_this_process_says_what_its_threads_do_without_being_asked() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def wait_for_the_test() -> None:
        entered.set()
        may_end.wait(20)

    thread = threading.Thread(target=wait_for_the_test, name="waiting")
    thread.start()
    assert entered.wait(20)
    text = progress.describe([os.getpid()])
    may_end.set()
    thread.join(20)
    assert "(waiting):" in text and "wait_for_the_test" in text and "(MainThread):" in text
    assert "test_this_process_says_what_its_threads_do" in text


def test_a_process_writes_its_own_stack_where_py_spy_is_missing(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_py_spy", lambda: None)
    for _ in range(2):  # a second report has the second stack alone
        text = progress.describe([sleeper.pid])
        assert text.count("in the_place_where_it_hangs") == 1
    assert sleeper.poll() is None


def test_a_process_that_was_not_prepared_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_py_spy", lambda: None)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert "(no stack: py-spy is not installed)" in progress.describe([process.pid])
        assert process.poll() is None
        process.kill()
    assert f"process {process.pid}: NoSuchProcess" in progress.describe([process.pid])


def test_the_collective_that_a_rank_is_in_is_named_with_its_caller(tmp_path: Path) -> None:
    state = CollectiveState()
    assert state.look() == {}
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert state.look()["last"] is None
        held = threading.Event()

        def hang() -> None:
            dist.all_gather_object([None], Slow(held))

        thread = threading.Thread(target=hang)
        thread.start()
        end = time.monotonic() + 10
        while not (state.look()["last"]) and time.monotonic() < end:
            time.sleep(0.01)
        last = state.look()["last"]
        assert last["in_it"] and last["call"].startswith("all_gather_object at ") and "in hang" in last["call"]
        held.set()
        thread.join(10)
        assert not state.look()["last"]["in_it"]
        assert sum(state.look()["begun"].values()) >= 1
    finally:
        dist.destroy_process_group()


class Slow:
    """Is pickled slowly: until then its sender is in the collective."""

    def __init__(self, held: threading.Event) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        self.held.wait(10)
        return int, (1,)


def test_the_report_says_what_could_not_be_asked_and_goes_on(tmp_path: Path) -> None:
    def fails() -> str:
        raise TimeoutError("waited 20 s for the state of the engines")

    path = tmp_path / "out" / REPORT
    said = {"counts": {"micro-batches": 8}, "pid": 7, "begun": {"dp": 4}, "last": None}
    board = {
        "trainer 0": said | {"time": time.time() - 300},
        "rollout manager": {"counts": {}, "time": time.time()},
    }
    sections = {
        "Progress": lambda: progress.progress_lines(board),
        "Engines": fails,
        "Collectives": lambda: progress.collective_lines(board),
    }
    progress.write_report(path, Phase("train", 400.0, 300.0).silence(240.0), sections)
    text = path.read_text()
    assert "nothing has gone on in the phase 'train' for 5 min" in text
    assert "trainer 0 (process 7): 8 micro-batches; last heard 300 s ago" in text
    assert "(not there: TimeoutError: waited 20 s for the state of the engines)" in text
    assert "trainer 0: none was seen; operations begun by each group: dp 4" in text
    progress.write_report(path, "again", {})
    assert path.read_text().startswith(text), "a second stall is written behind the first"


def test_a_node_tells_its_memory_and_every_process_of_the_run(sleeper: Any, tmp_path: Path) -> None:
    text = progress.describe_run("no such run", str(tmp_path), [sleeper.pid])
    assert "GiB are free" in text and "the_place_where_it_hangs" in text and f"process {os.getpid()}:" not in text
