"""Whether a user's function can be called the way slime will call it; found out before anything starts.

It calls nothing. The calls themselves are the Protocols of slime.rollout.base_types.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime.rollout.base_types import DataSourceClass, GenerateFn, ModelProvider, SampleHook

OPTIONAL_KEYWORDS: dict[type, tuple[str, ...]] = {
    GenerateFn: ("evaluation",),
    SampleHook: ("rollout_id", "evaluation"),
    ModelProvider: ("vp_stage",),
}
"""Protocol -> keywords that a function gets if it has a parameter of that name."""
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
    positional, keywords = call_of(protocol)
    offered = [name for name in OPTIONAL_KEYWORDS.get(protocol, ()) if name in own.parameters]
    try:
        own.bind(*positional, **dict.fromkeys([*keywords, *offered]))
    except TypeError as error:
        wanted = ", ".join([*positional, *(f"{name}=..." for name in [*keywords, *offered])])
        return f"it is called as ({wanted}), but its signature is {own}: {error}"
    if protocol is DataSourceClass and isinstance(fn, type):
        return missing_methods(fn)
    return None


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
