"""Timers on a device that works behind the host: what they add up, and when they wait for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from slime.observability.timer import HostClock, Timer, inverse_timer, timer


class Device:
    """Stands for a CUDA stream, which no CPU has: work is queued at once and done later, a mark reached after it."""

    def __init__(self) -> None:
        self.busy_until, self.waits = 0.0, 0

    def queue(self, seconds: float) -> None:
        self.busy_until += seconds

    def mark(self) -> float:
        return self.busy_until

    def seconds(self, start: float, end: float) -> float:
        self.waits += 1
        return end - start


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    Timer().reset()
    Timer().use(device)
    yield device
    Timer().use(HostClock())
    Timer().reset()


def test_what_was_queued_counts_for_the_timer_in_which_it_was_queued(device: Device) -> None:
    with timer("train"):
        with timer("log_probs"):
            device.queue(2.0)
        with timer("actor_train"):
            device.queue(5.0)
    assert Timer().log_dict() == {"train": 7.0, "log_probs": 2.0, "actor_train": 5.0}


def test_the_host_waits_only_when_the_sums_are_read(device: Device) -> None:
    for _ in range(3):
        with timer("log_probs"):
            device.queue(1.0)
    assert device.waits == 0
    assert Timer().log_dict() == {"log_probs": 3.0} == Timer().log_dict()
    assert device.waits == 3, "each part is read once"


def test_a_reset_forgets_parts_that_were_not_read_and_leaves_running_timers(device: Device) -> None:
    Timer().start("train_wait")
    for name in ("data_preprocess", "train"):
        with timer(name):
            device.queue(1.0)
    Timer().reset("train")
    assert Timer().log_dict() == {"data_preprocess": 1.0}
    Timer().reset()
    device.queue(4.0)
    Timer().end("train_wait")
    assert Timer().log_dict() == {"train_wait": 6.0}
    assert device.waits == 2


def test_a_timer_that_waits_around_a_block_leaves_the_block_out(device: Device) -> None:
    Timer().start("train_wait")
    device.queue(1.0)
    with inverse_timer("train_wait"):
        device.queue(10.0)
    device.queue(2.0)
    Timer().end("train_wait")
    assert Timer().log_dict() == {"train_wait": 3.0}


def test_a_timer_ends_by_the_clock_that_it_was_started_with(device: Device) -> None:
    Timer().start("start-up")
    device.queue(3.0)
    Timer().use(HostClock())
    Timer().end("start-up")
    assert Timer().log_dict() == {"start-up": 3.0}


def test_the_module_of_the_timers_does_not_import_torch() -> None:
    program = "import slime.observability.timer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
