"""The queue in front of the teacher: what is taken together, refused or dropped; where its ranks meet."""

from __future__ import annotations

import socket
import time

import pytest

from slime.backends.megatron_utils.server.megatron_server import _meeting_point
from slime.backends.megatron_utils.server.requests import Job, QueueFull, RequestQueue


def works(queue: RequestQueue) -> list[object]:
    return [job.work for job in queue.take(0)]


def test_jobs_are_taken_in_order_as_many_as_fit() -> None:
    queue = RequestQueue(max_jobs=9, max_tokens=10)
    for work, tokens in enumerate((4, 6, 1, 30, 2)):
        queue.put(Job(work, tokens))
    assert queue.counts() == (5, 43)
    assert [works(queue) for _ in range(4)] == [[0, 1], [2], [3], [4]]


def test_new_weights_wait_for_those_before_and_hold_up_those_behind() -> None:
    queue = RequestQueue(max_jobs=9, max_tokens=10)
    for job in (Job("a", 1), Job("weights", alone=True), Job("b", 1), Job("c", 1)):
        queue.put(job)
    assert [works(queue) for _ in range(3)] == [["a"], ["weights"], ["b", "c"]]


def test_a_full_line_refuses_and_a_client_that_left_is_dropped() -> None:
    queue = RequestQueue(max_jobs=2, max_tokens=10)
    gone = Job("gone", 1)
    queue.put(gone)
    queue.put(Job("here", 1))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        queue.put(Job("late", 1))
    gone.result.cancel()
    assert works(queue) == ["here"]


def test_waiting_for_a_job_ends() -> None:
    started = time.monotonic()
    assert RequestQueue(1, 1).take(0.05) == []
    assert time.monotonic() - started < 5


def test_those_that_wait_when_the_server_ends_are_told() -> None:
    queue = RequestQueue(2, 10)
    job = Job("a", 1)
    queue.put(job)
    queue.fail_all(lambda: RuntimeError("the server ends"))
    with pytest.raises(RuntimeError, match="the server ends"):
        job.result.result(0)


def test_a_teacher_of_one_process_listens_for_ranks_on_the_loopback_alone() -> None:
    address, listener = _meeting_point(world_size=1)
    assert isinstance(listener, socket.socket)
    with listener:
        assert (address, listener.getsockname()[0]) == ("127.0.0.1", "127.0.0.1")


def test_teachers_of_several_processes_meet_where_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _meeting_point(world_size=2) == ("10.0.0.1", 29500)
