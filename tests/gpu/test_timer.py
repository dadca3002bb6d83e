"""Timers on CUDA's clock: the device's time, without waiting for it; needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from slime.observability.timer import CudaClock, HostClock, Timer, timer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(autouse=True)
def cuda_clock() -> Iterator[None]:
    Timer().reset()
    Timer().use(CudaClock())
    yield
    Timer().use(HostClock())
    Timer().reset()


def work() -> None:
    torch.cuda._sleep(100_000_000)  # cycles: some 50 ms


def seconds_of_work() -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def test_nested_and_repeated_timers_have_the_devices_time_and_do_not_wait() -> None:
    seconds_of_work()  # warm up
    expected = seconds_of_work()
    start = time.perf_counter()
    with timer("train"):
        for _ in range(2):
            with timer("log_probs"):
                work()
        with timer("actor_train"):
            work()
    queued = time.perf_counter() - start
    found = Timer().log_dict()
    assert queued < expected / 5, "a mark must not wait for the device"
    assert found["log_probs"] == pytest.approx(2 * expected, rel=0.05)
    assert found["actor_train"] == pytest.approx(expected, rel=0.05)
    assert found["train"] == pytest.approx(3 * expected, rel=0.05)


def test_an_idle_device_leaves_the_hosts_time_also_across_freed_memory() -> None:
    Timer().start("train_wait")
    tensor = torch.empty(1 << 28, device="cuda")
    del tensor
    torch.cuda.empty_cache()
    time.sleep(0.3)
    Timer().end("train_wait")
    assert Timer().log_dict()["train_wait"] == pytest.approx(0.3, abs=0.1)
