"""A raylet or a GCS that is gone is noticed at once, one that is silent after a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from slime.processes.wait import wait
from slime.ray.supervisor import ANSWER_S, PERIOD_S, SILENT_S, Loss, RayWatch


class World:
    """A process in the raylet's place, a GCS that answers or does not, and a clock that is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answer: bool | Exception = True
        self.raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.losses: list[Loss] = []
        processes = {"raylet": psutil.Process(self.raylet.pid)}
        self.watch = RayWatch(self.losses.append, processes, self._ask, "127.0.0.9", lambda: self.now)

    def _ask(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def send(self, number: signal.Signals, status: str) -> None:
        os.kill(self.raylet.pid, number)
        wait("the signal to arrive", 10, lambda: psutil.Process(self.raylet.pid).status() == status, interval_s=0.01)

    def seconds_until_lost(self, at_most: float = 120.0) -> float | None:
        begin = self.now
        while self.now - begin < at_most:
            self.now += PERIOD_S
            if self.watch.look() is not None:
                return self.now - begin
        return None


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.raylet.kill()
    world.raylet.wait(10)


def test_a_ray_that_works_is_not_lost(world: World) -> None:
    assert world.seconds_until_lost() is None and world.watch.gone() is None


def test_a_raylet_that_was_killed_is_noticed_at_the_next_look(world: World) -> None:
    world.send(signal.SIGKILL, psutil.STATUS_ZOMBIE)
    loss = world.watch.look()
    assert loss is not None and loss == world.watch.gone()
    assert f"Ray's raylet (process {world.raylet.pid} on 127.0.0.9) is gone" in loss.what and loss.log == "raylet.out"


def test_the_watch_tells_of_a_loss_once_from_its_own_thread(world: World) -> None:
    world.send(signal.SIGKILL, psutil.STATUS_ZOMBIE)
    told = threading.Event()
    world.watch._on_loss = lambda loss: (world.losses.append(loss), told.set())  # type: ignore[assignment,func-returns-value]
    world.watch.start()
    assert told.wait(20)
    world.watch.stop()
    assert len(world.losses) == 1


def test_a_raylet_may_be_stopped_for_a_while(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.send(signal.SIGSTOP, psutil.STATUS_STOPPED)
    assert world.seconds_until_lost(SILENT_S - 1) is None
    world.send(signal.SIGCONT, psutil.STATUS_SLEEPING)
    assert world.watch.look() is None
    world.send(signal.SIGSTOP, psutil.STATUS_STOPPED)
    assert world.seconds_until_lost() == SILENT_S
    assert len(caplog.records) == 2, "a warning when it falls silent, not one a look"


def test_a_gcs_that_does_not_answer_is_lost_after_a_while(world: World) -> None:
    world.answer = RuntimeError("Deadline Exceeded\nmore")
    assert world.seconds_until_lost() == SILENT_S
    loss = world.watch.look()
    assert loss == Loss(f"Ray's GCS has not answered (Deadline Exceeded) for {SILENT_S:.0f} s", "gcs_server.out")


def test_a_driver_that_was_stopped_does_not_count_that_time(world: World) -> None:
    """Its question was under way when it was stopped, so that it found no answer in time."""
    world.now += 3600
    world.answer = RuntimeError("Deadline Exceeded")
    assert world.watch.look() is None
    assert world.seconds_until_lost() == SILENT_S - (ANSWER_S + PERIOD_S)
