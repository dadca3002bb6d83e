"""Blocking calls in threads of their own: bounded, first come first served, and one that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime.processes.wait import CallTimeout, DaemonThreads


@pytest.fixture
def release():
    """What hanging calls of a test wait for; set at its end."""
    event = threading.Event()
    yield event
    event.set()


async def until(condition):
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


def test_calls_return_raise_and_run_at_most_so_many_at_a_time_in_order():
    threads, running, most, order = DaemonThreads("test", 3), [], [], []

    def work(number):
        running.append(number)
        most.append(len(running))
        time.sleep(0.002)
        running.remove(number)
        return number * 2

    async def many(threads, work):
        return await asyncio.gather(*(threads.run(work, number) for number in range(20)))

    assert asyncio.run(many(threads, work)) == [number * 2 for number in range(20)]
    assert max(most) <= 3
    asyncio.run(many(DaemonThreads("test", 1), order.append))
    assert order == list(range(20))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(threads.run(lambda: 1 / 0))
    with pytest.raises(SystemExit):
        asyncio.run(threads.run(sys.exit, 3))
    with pytest.raises(RuntimeError, match="it raised StopIteration"):
        asyncio.run(threads.run(next, iter([])))


def test_waiting_for_a_thread_is_not_the_functions_time(release):
    threads = DaemonThreads("test", 1)

    async def one_behind_the_other():
        first = asyncio.ensure_future(threads.run(release.wait, 10))
        second = asyncio.ensure_future(threads.run(lambda: "in time", timeout_s=5))
        await asyncio.sleep(0)
        third = asyncio.ensure_future(threads.run(time.sleep, 0, timeout_s=0.01))
        await asyncio.sleep(0.05)  # five times as long as the third may take
        assert not third.done()
        release.set()
        return [await first, await second, await third]

    assert asyncio.run(one_behind_the_other()) == [True, "in time", None]


def test_a_call_that_hangs_is_given_up_and_frees_its_place(release):
    threads = DaemonThreads("test", 1)

    async def hang_then_work():
        with pytest.raises(CallTimeout, match="more than 0.01 s"):
            await threads.run(release.wait, 10, timeout_s=0.01)
        assert threads.num_lost == 1
        result = await threads.run(lambda: threading.current_thread().daemon)
        release.set()
        await until(lambda: threads.num_lost == 0)
        return result, await threads.run(lambda: "again")

    assert asyncio.run(hang_then_work()) == (True, "again"), "and it is a daemon, which no exit waits for"


def test_a_call_that_is_cancelled_while_it_waits_never_begins(release):
    threads, begun = DaemonThreads("test", 1), []

    async def cancel_the_second():
        first = asyncio.ensure_future(threads.run(release.wait, 10))
        second = asyncio.ensure_future(threads.run(begun.append, 2))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
        await threads.run(begun.append, 3)

    asyncio.run(cancel_the_second())
    assert begun == [3] and threads.num_lost == 0


def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr("slime.processes.wait._IDLE_S", 0.01)
    threads, seen = DaemonThreads("test", 2), []

    async def work():
        seen.append(await threads.run(threading.current_thread))
        await until(lambda: not seen[0].is_alive())
        assert await threads.run(lambda: "again") == "again"

    asyncio.run(work())


@pytest.mark.parametrize("kills", [True, False])
def test_the_processes_of_a_call_that_is_given_up_are_killed_where_asked(tmp_path, kills):
    """The shell waits for a child of its own; a process of an earlier call in the same thread stays."""
    threads = DaemonThreads("test", 1, kills_processes=kills)
    pids = tmp_path / "pids"
    command = f"sleep 30 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"

    async def give_up():
        earlier = await threads.run(subprocess.Popen, ["sleep", "30"])
        call = asyncio.ensure_future(threads.run(subprocess.run, ["sh", "-c", command]))
        await until(pids.exists)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        started = [int(pid) for pid in pids.read_text().split()]
        if kills:
            await until(lambda: not any(is_running(pid) for pid in started))
            await until(lambda: threads.num_lost == 0)  # without its process the function ends, too
        alive = [is_running(pid) for pid in started]
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        is_there = earlier.poll() is None
        earlier.kill()
        earlier.wait(10)
        return alive, is_there

    assert asyncio.run(give_up()) == ([not kills, not kills], True)


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_the_interpreter_ends_while_a_call_hangs():
    program = (
        "import asyncio, time; from slime.processes.wait import DaemonThreads\n"
        "async def main():\n"
        "    call = asyncio.ensure_future(DaemonThreads('test', 1).run(time.sleep, 60))\n"
        "    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
