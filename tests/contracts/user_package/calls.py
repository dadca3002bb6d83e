"""What slime called, in order, and with exactly which arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call of a hook."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


CALLS: list[Call] = []


def recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Notes each call as it came, by position or by name, before the function sees it. The signature stays."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(Call(fn.__name__, args, kwargs))
        return fn(*args, **kwargs)

    return wrapper


def of(name: str) -> list[Call]:
    """The calls of one hook."""
    return [call for call in CALLS if call.name == name]
