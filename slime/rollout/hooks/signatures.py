"""Whether a user's function can be called the way slime will call it; found out before anything starts.

It calls nothing. The calls themselves are the Protocols of slime.rollout.base_types.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from types import CellType, CodeType
from typing import Any

from slime.rollout.base_types import (
    HOOKS,
    DataSourceClass,
    GenerateFn,
    ModelProvider,
    ProcessReward,
    RewardFn,
    SampleHook,
)

# Protocol -> keywords that a function gets if it has a parameter of that name
OPTIONAL_KEYWORDS: dict[type, tuple[str, ...]] = {
    GenerateFn: ("evaluation",),
    SampleHook: ("rollout_id", "evaluation"),
    ModelProvider: ("vp_stage",),
}
# Protocols of functions whose result is used as it is; a generate function must be async, the other three may be
NOT_AWAITED = frozenset(HOOKS.values()) - {GenerateFn, SampleHook, RewardFn, ProcessReward}
DATA_SOURCE_METHODS = ("get_samples", "add_samples", "save", "load", "__len__")


def signature_problem(fn: Any, protocol: type) -> str | None:
    """Why `fn` cannot be called as `protocol` says; None when it can (or has no readable signature).

    Positional parameters are passed by position, so their names are free; but a keyword that slime passes only to
    functions that have it must not be one of them.
    """
    if not callable(fn):
        return f"it is a {type(fn).__name__}, not a function"
    try:
        own = inspect.signature(fn)
    except (TypeError, ValueError):
        return None  # written in C
    if protocol is GenerateFn and is_batch_generate(fn):
        return None
    positional, keywords = call_of(protocol)
    offered = [name for name in OPTIONAL_KEYWORDS.get(protocol, ()) if name in own.parameters]
    try:
        own.bind(*positional, **dict.fromkeys([*keywords, *offered]))
    except TypeError as error:
        wanted = ", ".join([*positional, *(f"{name}=..." for name in [*keywords, *offered])])
        return f"it is called as ({wanted}), but its signature is {own}: {error}"
    if problem := async_problem(fn, protocol):
        return problem
    if protocol is DataSourceClass and isinstance(fn, type):
        return missing_methods(fn)
    return None


def async_problem(fn: Any, protocol: type) -> str | None:
    """Why a function of `protocol` must be a coroutine function, or must not be one; None when it is right.

    A plain function may return what a coroutine function that it calls gives it, so only one that surely does not is
    refused here; the others are found out when they are called.
    """
    if protocol is GenerateFn and not may_return_awaitable(fn):
        return "it is not async, but what it returns is awaited; write it as `async def`"
    if protocol in NOT_AWAITED and is_async(fn):
        return "it is async, but what it returns is not awaited; write it as `def`"
    if protocol is DataSourceClass and isinstance(fn, type):
        for name in DATA_SOURCE_METHODS:
            if is_async(getattr(fn, name, None)):
                return f"{fn.__name__}.{name} is async, but what it returns is not awaited; write it as `def`"
    return None


def is_async(fn: Any) -> bool:
    """Whether a function, a partial of one or an object with `__call__` is a coroutine function."""
    fn = _called(fn)
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)


def may_return_awaitable(fn: Any) -> bool:
    """Whether awaiting the result of a function can work: it is a coroutine function, or may call one."""
    seen: list[Any] = []
    unread = [_called(fn)]
    while unread:
        fn = unread.pop()
        if is_async(fn):
            return inspect.iscoroutinefunction(fn)
        seen.append(fn)
        code = getattr(fn, "__code__", None)
        if code is None:
            return not isinstance(fn, type)  # written in C
        if any(isinstance(value, CodeType) and value.co_flags & inspect.CO_COROUTINE for value in code.co_consts):
            return True
        captured = [cell.cell_contents for cell in fn.__closure__ or () if cell != CellType()]
        named = [fn.__globals__[name] for name in code.co_names if name in fn.__globals__]
        owners = [*captured, *named, getattr(fn, "__self__", None)]
        attributes = [inspect.getattr_static(owner, name, None) for owner in owners for name in code.co_names]
        called = [getattr(value, "__func__", value) for value in captured + named + attributes]
        if any(value is asyncio or is_async(value) for value in called):
            return True
        unread += [value for value in captured if inspect.isfunction(value) and value not in seen]  # it is a decorator
    return False


def _called(fn: Any) -> Any:
    """The function that is called when `fn` is: of a partial the one inside, of an object its `__call__`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn) or isinstance(fn, type) or not callable(fn):
        return fn
    return fn if inspect.iscoroutinefunction(fn) else fn.__call__


def is_batch_generate(fn: Any) -> bool:
    """Whether a generate function is `fn(args, samples[, evaluation])`, which takes a list and returns one."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False
    return names[1:] in (["samples"], ["samples", "evaluation"])


def call_of(protocol: type) -> tuple[list[str], list[str]]:
    """Names of what a hook is passed by position, and by keyword."""
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def missing_methods(source: Any) -> str | None:
    """What a data source, or its class, lacks; None when it has all that is called."""
    if missing := [name for name in DATA_SOURCE_METHODS if not callable(getattr(source, name, None))]:
        name = source.__name__ if isinstance(source, type) else "None" if source is None else type(source).__name__
        return f"{name} has no {' and no '.join(missing)}; a data source needs {', '.join(DATA_SOURCE_METHODS)}"
    return None


def accepts_keyword(fn: Any, name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any keyword."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name == name for p in parameters)
