"""Calling every engine at once and waiting for all of them with a deadline.

An engine is whatever has the methods of `SGLangEngine`: a Ray actor handle in a run, the plain object in a test.
It does not know what the calls mean.
"""

from __future__ import annotations

import concurrent.futures as cf
from collections.abc import Callable, Sequence
from typing import Any

Calls = list["cf.Future[Any]"]


class WeightSyncError(RuntimeError):
    """The engines did not take the weights as they were sent."""


class EngineFleet:
    """The engines of one weight updater.

    Args:
        engines: Ray actor handles, or plain objects.
        deadline_s: seconds that one call may take.
    """

    def __init__(self, engines: Sequence[Any], *, deadline_s: float) -> None:
        self.engines = list(engines)
        self.deadline_s = deadline_s
        self._threads = cf.ThreadPoolExecutor(max_workers=max(1, len(self.engines)), thread_name_prefix="engine-call")

    def __len__(self) -> int:
        return len(self.engines)

    def start(self, method: str, *values: Any, **keywords: Any) -> Calls:
        """Begin the same call on every engine."""
        return self.start_each(method, [(values, keywords)] * len(self.engines))

    def start_each(self, method: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Calls:
        """Begin a call on every engine, each with its own (arguments, keywords)."""
        return [
            self._begin(getattr(engine, method), values, keywords)
            for engine, (values, keywords) in zip(self.engines, calls, strict=True)
        ]

    def wait(self, calls: Calls, what: str) -> list[Any]:
        """The results of begun calls.

        Raises:
            WeightSyncError: an engine failed (raised as soon as the first does), or the deadline passed.
        """
        done, pending = cf.wait(calls, timeout=self.deadline_s, return_when=cf.FIRST_EXCEPTION)
        for index, call in enumerate(calls):
            if call in done and (error := call.exception()) is not None:
                raise WeightSyncError(f"{what} failed on engine {index}: {_one_line(error)}") from error
        if pending:
            raise WeightSyncError(f"waited {self.deadline_s:.0f} s for {what}; {len(pending)} engine(s) are silent")
        return [call.result() for call in calls]

    def call(self, method: str, *values: Any, what: str | None = None, **keywords: Any) -> list[Any]:
        """Call every engine and wait; results in the engines' order."""
        return self.wait(self.start(method, *values, **keywords), what or method)

    def _begin(self, bound: Any, values: tuple[Any, ...], keywords: dict[str, Any]) -> cf.Future[Any]:
        remote: Callable[..., Any] | None = getattr(bound, "remote", None)
        if remote is not None:
            return remote(*values, **keywords).future()
        return self._threads.submit(bound, *values, **keywords)


def _one_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error  # a Ray error repeats the whole remote traceback in its text
    return f"{type(cause).__name__}: {cause}"
