"""Do many jobs in threads, with a bar that counts bytes; the first error stops the rest.

At most a few jobs per thread are in flight, so that memory holds as many results as there are threads.
"""

from __future__ import annotations

import concurrent.futures as cf
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

from tqdm import tqdm

Job = TypeVar("Job")


def usual_threads() -> int:
    """Threads unless told otherwise: the cores that this process may use, at most 4, for each holds a tensor."""
    return min(4, len(os.sched_getaffinity(0)))


class Bar:
    """A progress bar of bytes on stderr, with "in 1.23 s" at its end; where that is no terminal, drawn twice a minute.

    Args:
        what: is done, in a word or two.
        total: bytes.
        done: bytes that an earlier run did.
    """

    def __init__(self, what: str, total: int, *, done: int = 0) -> None:
        self._bar = tqdm(
            desc=what,
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
            file=sys.stderr,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.set_postfix_str(f"in {self._bar.format_dict['elapsed']:.2f} s", refresh=False)
        self._bar.close()

    def add(self, num_bytes: int) -> None:
        """So many bytes are done."""
        self._bar.update(num_bytes)


def run_in_threads(jobs: Iterable[Job], work: Callable[[Job], int], *, num_threads: int, bar: Bar) -> None:
    """Call work(job) for every job, `num_threads` at a time, in about their order; it returns bytes for the bar.

    Raises:
        what the first job that failed raised; those that have not begun are left out.
    """
    if num_threads == 1:
        for job in jobs:
            bar.add(work(job))
        return
    todo = iter(jobs)
    with cf.ThreadPoolExecutor(num_threads, thread_name_prefix="convert") as threads:
        running = {threads.submit(work, job) for job in itertools.islice(todo, num_threads)}
        try:
            while running:
                done, running = cf.wait(running, return_when=cf.FIRST_COMPLETED)
                for one in done:
                    bar.add(one.result())
                running |= {threads.submit(work, job) for job in itertools.islice(todo, len(done))}
        finally:
            for one in running:
                one.cancel()
