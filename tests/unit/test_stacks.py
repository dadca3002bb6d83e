"""Stacks of the process that asks."""

from __future__ import annotations

import os
import threading

from slime.processes import progress


def test_the_main_threads_stack_comes_first_and_so_is_not_what_is_cut() -> None:
    release = threading.Event()
    others = [threading.Thread(target=release.wait) for _ in range(20)]
    try:
        for thread in others:
            thread.start()
        found = progress.describe([os.getpid()]).split("\nThread ")[1:]
    finally:
        release.set()
        for thread in others:
            thread.join()
    assert len(found) > len(others)
    assert "(MainThread)" in found[0] and "test_the_main_threads_stack_comes_first" in found[0]
