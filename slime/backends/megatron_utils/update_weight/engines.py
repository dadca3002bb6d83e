"""Calling every engine at once and waiting for all of them with a deadline.

An engine is whatever has the methods of `EngineClient`: one that is reached over HTTP in a run, the plain object in a
test.
"""

from __future__ import annotations

import concurrent.futures as cf
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist

from slime.backends.sglang_utils.weight_transfer import DirectEngine, EngineContact
from slime.utils.distributed_utils import gathered, get_gloo_group
from slime.utils.errors import HttpError

T = TypeVar("T")
Calls = dict[int, "cf.Future[Any]"]
"""Calls that were begun, by the number of the engine."""
CALLS_PER_ENGINE = 2  # one that an engine works on, and one that waits there


class WeightSyncError(RuntimeError):
    """The engines did not take the weights as they were sent.

    Attributes:
        is_final: sending everything again cannot help.
        silent: numbers of the engines that have not answered.
    """

    def __init__(self, message: str, *, is_final: bool = False, silent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.silent = tuple(silent)


class NoLinkError(WeightSyncError):
    """Engines and trainer cannot form a group; sending again over it cannot help, another way can."""

    def __init__(self, message: str, *, silent: Sequence[int] = ()) -> None:
        super().__init__(message, is_final=True, silent=silent)


def reach(engines: Sequence[Any], *, deadline_s: float) -> list[Any]:
    """The engines to call directly: what Ray actors own is asked over HTTP, other objects stay what they are.

    Raises:
        WeightSyncError: an actor does not say where its engine is.
    """
    asked = {i: engine.contact.remote().future() for i, engine in enumerate(engines) if _is_remote(engine)}
    contacts = _results(asked, "asking where the engines are", deadline_s, engines, is_silent=lambda error: True)
    found = dict(zip(asked, contacts, strict=True))
    return [DirectEngine(found[i]) if i in found else engine for i, engine in enumerate(engines)]


def contact_of(engine: Any, number: int) -> EngineContact:
    """What is known of an engine; of one that is no `EngineClient`, its number."""
    contact = getattr(engine, "contact", None)
    return contact() if contact is not None else EngineContact(number, "an unknown address")


class EngineFleet:
    """The engines of one weight updater, or some of them; each keeps its number.

    Args:
        engines: by number, or all in order.
        deadline_s: seconds that one call may take.
        threads: that make the calls to each; None makes some for all.
    """

    def __init__(
        self,
        engines: Mapping[int, Any] | Sequence[Any],
        *,
        deadline_s: float,
        threads: Mapping[int, cf.ThreadPoolExecutor] | None = None,
    ) -> None:
        self.engines = dict(engines) if isinstance(engines, Mapping) else dict(enumerate(engines))
        self.deadline_s = deadline_s
        self._threads = dict.fromkeys(self.engines, _threads(CALLS_PER_ENGINE * len(self.engines)))
        self._threads |= threads or {}
        self._failed: set[int] | None = None

    def __len__(self) -> int:
        return len(self.engines)

    def some(self, numbers: Sequence[int]) -> Self:
        """The engines with these numbers."""
        chosen = {number: self.engines[number] for number in numbers}
        return type(self)(chosen, deadline_s=self.deadline_s, threads=self._threads)

    def in_order(self) -> Self:
        """The same engines: a call begins on one of them when it has answered the call before.

        Calls that are begun together may arrive in another order, for each has a connection of its own. When one has
        failed, later ones fail, too, and do not reach the engine.
        """
        threads = {number: _threads(1) for number in self.engines}
        found = type(self)(self.engines, deadline_s=self.deadline_s, threads=threads)
        found._failed = set()
        return found

    def start(self, method: str, *values: Any, **keywords: Any) -> Calls:
        """Begin the same call on every engine."""
        return self.start_each(method, [(values, keywords)] * len(self.engines))

    def start_each(self, method: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Calls:
        """Begin a call on every engine, each with its own (arguments, keywords)."""
        return {
            number: self._threads[number].submit(self._call, number, getattr(engine, method), values, keywords)
            for (number, engine), (values, keywords) in zip(self.engines.items(), calls, strict=True)
        }

    def _call(self, number: int, method: Callable[..., Any], values: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._failed is None:
            return method(*values, **keywords)
        if number in self._failed:
            raise WeightSyncError("it was not asked, because what it was asked before has failed")
        self._failed.add(number)
        result = method(*values, **keywords)
        self._failed.discard(number)
        return result

    def wait(self, calls: Calls, what: str) -> list[Any]:
        """The results of begun calls, in the engines' order.

        Raises:
            WeightSyncError: an engine failed (raised as soon as the first does), or the deadline passed.
        """
        return _results(calls, what, self.deadline_s, self.engines)

    def call(self, method: str, *values: Any, what: str | None = None, **keywords: Any) -> list[Any]:
        """Call every engine and wait; results in the engines' order."""
        return self.wait(self.start(method, *values, **keywords), what or method)


def _threads(count: int) -> cf.ThreadPoolExecutor:
    """At most so many; none is started before there is work for it."""
    return cf.ThreadPoolExecutor(max_workers=max(1, count), thread_name_prefix="engine-call")


def _is_remote(engine: Any) -> bool:
    return hasattr(getattr(engine, "contact", None), "remote")


def gave_no_answer(error: BaseException) -> bool:
    """Whether an engine that was asked has not answered: it is gone, or hangs. One that refuses has."""
    if isinstance(error, HttpError):
        return error.status is None or error.status >= 500
    return isinstance(error, TimeoutError)


def _results(
    calls: Calls,
    what: str,
    deadline_s: float,
    engines: Any,
    *,
    is_silent: Callable[[BaseException], bool] = gave_no_answer,
) -> list[Any]:
    done, pending = cf.wait(calls.values(), timeout=deadline_s, return_when=cf.FIRST_EXCEPTION)
    for number, call in calls.items():
        if call in done and (error := call.exception()) is not None:
            raise WeightSyncError(
                f"{what} failed on {name_of(engines[number], number)}: {one_line(error)}",
                # the next attempt would wait as long
                is_final=any(isinstance(one, TimeoutError) for one in (error, error.__cause__)),
                silent=[number] if is_silent(error) else [],
            ) from error
    if pending:
        silent = [number for number, call in calls.items() if call in pending]
        names = ", ".join(name_of(engines[number], number) for number in silent)
        raise WeightSyncError(
            f"waited {deadline_s:.0f} s for {what}; {len(pending)} engine(s) are silent: {names}",
            is_final=True,
            silent=silent,
        )
    return [call.result() for call in calls.values()]


def name_of(engine: Any, number: int) -> str:
    """What to call an engine in a message; a Ray actor is not asked."""
    return f"engine {number}" if _is_remote(engine) else str(contact_of(engine, number))


def one_line(error: BaseException) -> str:
    """Type and text of an error."""
    cause = getattr(error, "cause", None) or error  # a Ray error repeats the whole remote traceback in its text
    return f"{type(cause).__name__}: {cause}"


# ---- errors that every rank of the trainer learns of (collective)


def from_source(error: WeightSyncError | None, *, version: int, deadline_s: float) -> WeightSyncError | None:
    """Return the source rank's error on every rank; a rank's own one comes first.

    Args:
        error: of this rank.
        version: of the sync, for messages.
        deadline_s: of the process group, for messages.

    Raises:
        WeightSyncError: the source rank did not come here in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return error
    held = [error]
    try:
        dist.broadcast_object_list(held, src=0, group=get_gloo_group())
    except RuntimeError as late:
        if "Timed out" not in str(late):  # the source is gone, which is reported by its own error
            raise
        raise WeightSyncError(
            f"weight sync {version}: rank {dist.get_rank()} waited {deadline_s:.0f} s for rank 0"
            ", which hands the weights to the engines; if that takes longer, raise --distributed-timeout-minutes",
            is_final=True,
        ) from late
    return error or held[0]


def together(action: Callable[[], T]) -> T:
    """Do something on every rank; where a group cannot be formed on one, every rank raises its NoLinkError."""
    result, error = None, None
    try:
        result = action()
    except NoLinkError as failed:
        error = failed
    if (first := next(filter(None, gathered(error)), None)) is not None:
        raise first
    return cast(T, result)
