"""Waiting returns what was found, names what it waited for, and stops early when looking on is pointless."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime.processes.wait import WaitTimeout, lock_file, wait, wait_async


def test_it_returns_the_first_value_that_is_neither_none_nor_false() -> None:
    answers = iter([None, False, 0])
    assert wait("a number", 5, lambda: next(answers), interval_s=0.001) == 0


def test_the_error_names_what_was_waited_for_and_how_long() -> None:
    # The pause is cut to what is left: the whole interval would outlast the limit of a test.
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for the kettle"):
        wait("the kettle", 0.05, lambda: None, interval_s=10_000)


def test_it_polls_once_even_without_any_time() -> None:
    assert wait("something at hand", 0, lambda: "here") == "here"


def test_a_failed_check_ends_the_wait_at_once() -> None:
    def check() -> None:
        raise RuntimeError("the process died")

    with pytest.raises(RuntimeError, match="the process died"):
        wait("an answer", 60, lambda: None, check=check)


def test_the_async_twin_does_the_same() -> None:
    answers = iter([None, "found"])

    async def poll() -> str | None:
        return next(answers)

    async def never() -> None:
        return None

    assert asyncio.run(wait_async("a word", 5, poll, interval_s=0.001)) == "found"
    with pytest.raises(WaitTimeout, match="waited 0.01 s for nothing"):
        asyncio.run(wait_async("nothing", 0.01, never, interval_s=0.001))


def test_a_locked_file_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as other, path.open("a") as mine:
        lock_file(other, "the lock", 1)
        with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for our turn"):
            lock_file(mine, "our turn", 0.05)
        other.close()
        lock_file(mine, "our turn", 5)


def test_several_share_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as one, path.open("a") as two:
        lock_file(one, "a share", 1, shared=True)
        lock_file(two, "a share", 1, shared=True)
