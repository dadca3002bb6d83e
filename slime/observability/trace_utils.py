"""Traces of samples: what happened to each, when, and inside what; kept in `sample.trace`, so dumps have them.

`sample.trace` is plain data that survives `Sample.to_dict` / `from_dict`::

    {"version": 1, "trace_id": ..., "sample_id": ..., "group_id": ..., "attempt": 0,
     "events": [{"type": "span_start" | "span_end" | "event", "name": ..., "ts": <seconds since 1970>,
                 "trace_id": ..., "sample_id": ..., "group_id": ..., "attempt": ...,
                 "span_id": ..., "parent_span_id": ..., "attrs": {}}]}

A span or event that user code records on a sample binds a trace to it. slime's own spans (`span_if_traced`) record
only on samples that have one: a rollout binds traces when its samples are dumped, since nothing else reads them.
What fails in here is logged and never raised. tools/trace_timeline_viewer.py draws the timeline.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, ClassVar, TypeVar

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

TraceHandle = dict[str, Any]  # The trace itself; it may stand for its sample wherever something is recorded
TRACE_VERSION = 1
MAX_EVENTS = 10_000  # Events that one sample keeps; later ones are counted in `trace["dropped_events"]`
MAX_TEXT = 500  # Characters of an error's message, or of a value that is no plain data

# trace_id -> the span that runs now. Never changed in place: tasks inherit it, and each goes on from what it got.
_running: ContextVar[Mapping[str, str]] = ContextVar("slime_running_spans")
_NOTHING_RUNS: Mapping[str, str] = {}

SGLANG_TRACE_META_KEYS = (
    "id",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "dp_rank",
    "e2e_latency",
    "queue_time",
    "decode_throughput",
    "request_received_ts",
    "api_server_dispatch_finish_ts",
    "forward_entry_time",
    "prefill_finished_time",
    "request_finished_ts",
    "response_sent_to_client_ts",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_verify_ct",
)


class _never_fails:  # noqa: N801 (used like a function)
    """A `with` block whose exceptions are logged and go no further: a trace must not end a run.

    Args:
        what: was to be recorded.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            logger.warning("tracing: %s was not recorded: %s: %s", self._what, type(error).__name__, error)
        return isinstance(error, Exception)


def bind_trace(sample: Any) -> TraceHandle | None:
    """The sample's trace; made if it has none. None when nothing can be attached to the object."""
    if isinstance(sample, dict):  # a handle
        return sample
    with _never_fails("bind_trace"):
        attributes = vars(sample)
        trace = attributes.get("trace")
        if trace is None:
            trace = {
                "version": TRACE_VERSION,
                "trace_id": uuid.uuid4().hex,
                "sample_id": attributes.get("index"),
                "group_id": attributes.get("group_index"),
                "attempt": 0,
                "events": [],
            }
            sample.trace = trace
        return trace
    return None


def note_times(samples: Iterable[Any], name: str, begin: float) -> None:
    """Add to `sample.times`, which every sample has: when its work began first and ended last, in seconds since 1970,
    and under `name` the seconds of this part, which began at `begin` and ends now."""
    end = time.time()
    for sample in samples:
        times = vars(sample).setdefault("times", {"begin": begin})
        times[name] = times.get(name, 0.0) + end - begin
        times["end"] = end


def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> None:
    """The next try at the same samples begins (a retry, or the rest of a partial response); its events say so.

    Args:
        target: as for `trace_event`.
        attrs: plain values that say more, kept in an event "next_attempt"; None records none.
    """
    with _never_fails("trace_next_attempt"):
        for trace in _traces(target):
            trace["attempt"] += 1
        if attrs is not None:
            trace_event(target, "next_attempt", attrs=attrs)


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Record a moment.

    Args:
        target: a sample or its handle, or a (nested) list of them; None records nothing.
        name: what happened.
        attrs: plain values that say more.
    """
    with _never_fails(f"the event {name}"):
        running, now, plain = _running.get(_NOTHING_RUNS), time.time(), _plain(attrs or {})
        for trace in _traces(target):
            parent = running.get(trace["trace_id"], trace.get("parent_span_id"))
            _append(trace, "event", name, now, span_id=None, parent=parent, attrs=plain)


class trace_span:  # noqa: N801 (used like a function)
    """Record what a `with` block takes: a start when it is entered, an end when it is left. Gives the span itself.

    Spans and events of the same sample inside the block, also in tasks that it starts, are its children.

    Args:
        target: a sample, or a (nested) list of them; None records nothing.
        name: what the block does.
        attrs: plain values that are known at the start; `set` and `update` add to the end.
        record_error: an exception that leaves the block becomes the attribute "error" of the end.

    Example:
        >>> from slime.utils.types import Sample
        >>> sample = Sample(index=3)
        >>> with trace_span(sample, "tool", attrs={"name": "calculator"}) as span:
        ...     span.set("result", 42)
        >>> [(event["type"], event["attrs"]) for event in sample.trace["events"]]
        [('span_start', {'name': 'calculator'}), ('span_end', {'result': 42})]
    """

    __slots__ = ("_attrs", "_more", "_name", "_open", "_record_error", "_target", "_token")
    is_recorded: ClassVar[bool] = True

    def __init__(
        self, target: Any, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
    ) -> None:
        self._target, self._name, self._attrs, self._record_error = target, name, attrs, record_error
        self._more: dict[str, Any] = {}
        self._open: list[tuple[dict[str, Any], str, str | None]] = []  # (trace, span_id, parent) of each sample
        self._token: Token[Mapping[str, str]] | None = None

    def set(self, key: str, value: Any) -> None:
        """Add one attribute to the end of the span."""
        self._more[key] = value

    def update(self, attrs: Mapping[str, Any]) -> None:
        """Add attributes to the end of the span."""
        with _never_fails(f"the attributes of span {self._name}"):
            self._more.update(attrs)

    def __enter__(self) -> trace_span:
        with _never_fails(f"the start of span {self._name}"):
            running, now, plain = _running.get(_NOTHING_RUNS), time.time(), _plain(self._attrs or {})
            inside = dict(running)
            for trace in _traces(self._target):
                span_id = os.urandom(8).hex()
                parent = running.get(trace["trace_id"], trace.get("parent_span_id"))
                _append(trace, "span_start", self._name, now, span_id=span_id, parent=parent, attrs=plain)
                self._open.append((trace, span_id, parent))
                inside[trace["trace_id"]] = span_id
            self._token = _running.set(inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _never_fails(f"the end of span {self._name}"):
            if self._token is not None:
                with contextlib.suppress(ValueError):  # left in another context: nothing of this one to take back
                    _running.reset(self._token)
            if error is not None and self._record_error:
                self._more["error"] = f"{type(error).__name__}: {error}"[:MAX_TEXT]
            now, plain = time.time(), _plain(self._more)
            for trace, span_id, parent in self._open:
                _append(trace, "span_end", self._name, now, span_id=span_id, parent=parent, attrs=plain)


class _NoSpan:
    """Stands for a span that records nothing; one object serves all."""

    is_recorded: ClassVar[bool] = False

    def set(self, key: str, value: Any) -> None:
        """Nothing."""

    def update(self, attrs: Mapping[str, Any]) -> None:
        """Nothing."""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


NO_SPAN = _NoSpan()


def is_traced(sample: Any) -> bool:
    """Whether a trace is bound to the sample."""
    return "trace" in vars(sample)


def span_if_traced(target: Any, name: str) -> trace_span | _NoSpan:
    """`trace_span` for what has a trace: a sample, or those of a flat list that have one.

    Without a trace it is a span that records nothing, and costs one look-up a sample. `is_recorded` tells which it is.
    """
    if isinstance(target, list):
        traced = [sample for sample in target if "trace" in vars(sample)]
        return trace_span(traced, name) if traced else NO_SPAN
    return trace_span(target, name) if "trace" in vars(target) else NO_SPAN


def trace_function(
    name: str,
    *,
    target: Any = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[F], F]:
    """Decorator of a function or coroutine function: each call is a span.

    Args:
        name: of the span.
        target: whose span it is: the name of the parameter that has the sample or samples (`target="sample"`), or an
            object that is traced itself.
        target_getter: computes it from the call's arguments instead.
        attrs_getter: computes the span's attributes from the call's arguments.
        record_error: as in `trace_span`.
    """

    def decorate(fn: F) -> F:
        find = target_getter or _target_finder(fn, target)

        def span(positional: tuple[Any, ...], named: dict[str, Any]) -> trace_span:
            found = attrs = None
            with _never_fails(f"the target or attributes of span {name}"):
                found = find(*positional, **named)
                attrs = attrs_getter(*positional, **named) if attrs_getter else None
            return trace_span(found, name, attrs=attrs, record_error=record_error)

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with span(args, kwargs):
                    return await fn(*args, **kwargs)

            return call_async  # type: ignore[return-value]

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return fn(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def export_trace(handle: Any) -> dict[str, Any] | None:
    """The trace of a handle, or of a sample, as plain data for another process, with the span that runs now.

    None when there is no trace.
    """
    with _never_fails("export_trace"):
        trace = handle if isinstance(handle, dict) else vars(handle).get("trace")
        if trace is None:
            return None
        exported = copy.deepcopy(trace)
        exported["parent_span_id"] = _running.get(_NOTHING_RUNS).get(trace["trace_id"], trace.get("parent_span_id"))
        return exported
    return None


def import_trace(sample: Any, data: Mapping[str, Any] | None) -> None:
    """Take over a trace from `export_trace`.

    A sample without a trace continues this one: its spans are children of the span that ran at the export. A sample
    with the same trace gets the events that it has not seen (what another process added). Anything else is left out.
    """
    with _never_fails("import_trace"):
        if data is None:
            return
        own = vars(sample).get("trace")
        if own is None:
            sample.trace = copy.deepcopy(dict(data))
        elif own["trace_id"] == data["trace_id"]:
            seen = {_identity(event) for event in own["events"]}
            own["events"] += [copy.deepcopy(event) for event in data["events"] if _identity(event) not in seen]
            own["events"].sort(key=lambda event: event["ts"])
            own["attempt"] = max(own["attempt"], data["attempt"])
        else:
            logger.warning("sample %s has another trace than the one to import", own["sample_id"])


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an engine's `meta_info` says about a call, as attributes: its length, its end, its times, its weights."""
    with _never_fails("build_sglang_meta_trace_attrs"):
        if not meta:
            return {}
        attrs = {f"sglang_{key}": meta[key] for key in SGLANG_TRACE_META_KEYS if meta.get(key) is not None}
        reason = meta.get("finish_reason")
        if reason:
            attrs["sglang_finish_reason"] = reason.get("type") if isinstance(reason, Mapping) else str(reason)
        return attrs
    return {}


def _traces(target: Any) -> Iterable[dict[str, Any]]:
    """The traces of a sample, of a handle or of a nested list of them, each once."""
    if target is None:
        return []
    if not isinstance(target, list | tuple):
        trace = bind_trace(target)
        return [] if trace is None else [trace]
    found = (trace for entry in target for trace in _traces(entry))
    return list({trace["trace_id"]: trace for trace in found}.values())


def _append(
    trace: dict[str, Any],
    kind: str,
    name: str,
    now: float,
    *,
    span_id: str | None,
    parent: str | None,
    attrs: dict[str, Any],
) -> None:
    if len(trace["events"]) >= MAX_EVENTS:
        trace["dropped_events"] = trace.get("dropped_events", 0) + 1
        return
    trace["events"].append(
        {
            "type": kind,
            "name": name,
            "ts": now,
            "trace_id": trace["trace_id"],
            "sample_id": trace["sample_id"],
            "group_id": trace["group_id"],
            "attempt": trace["attempt"],
            "span_id": span_id,
            "parent_span_id": parent,
            "attrs": dict(attrs),
        }
    )


def _plain(value: Any) -> Any:
    """Attributes as plain data that any reader of a dump can load."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)[:MAX_TEXT]


def _target_finder(fn: Callable[..., Any], target: Any) -> Callable[..., Any]:
    if not isinstance(target, str):
        return lambda *args, **kwargs: target
    signature = inspect.signature(fn)
    if target not in signature.parameters:
        logger.warning("trace_function: %s has no parameter %r, so its calls are not traced", fn, target)
        return lambda *args, **kwargs: None
    return lambda *args, **kwargs: signature.bind_partial(*args, **kwargs).arguments.get(target)


def _identity(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return event["type"], event["name"], event["ts"], event["span_id"]
