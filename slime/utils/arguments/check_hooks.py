"""Checks of hook flags: each path loads, names something callable, and can be called the way slime will call it.

It knows no hook: which flags are hooks, and their call, come in as a table. Loading runs the user's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.misc import load_function

SignatureProblem = Callable[[Any, type], str | None]


def check_hooks(
    values: dict[str, Any],
    defaults: dict[str, Any],
    hooks: dict[str, type],
    signature_problem: SignatureProblem,
) -> Iterator[str]:
    """Check every hook flag that is not at its default.

    Args:
        values: attribute -> value of the flags.
        defaults: attribute -> default; slime's own functions need no check.
        hooks: attribute -> Protocol of its function.
        signature_problem: why a function does not fit a Protocol, or None.
    """
    for attribute, protocol in hooks.items():
        value = values.get(attribute)
        if not value or value == defaults.get(attribute):
            continue
        for path in value if isinstance(value, list) else [value]:
            yield from check_hook("--" + attribute.replace("_", "-"), path, protocol, signature_problem)


def check_hook(option: str, path: str, protocol: type, signature_problem: SignatureProblem) -> Iterator[str]:
    """Check one hook path; `option` names where it was given."""
    if path.endswith(".py"):
        yield f"{option} {path} names a file but no function in it; write {path}:function."
        return
    try:
        function = load_function(path)
    except ImportError as error:
        yield f"{option}: {error}."
        return
    except Exception as error:  # the user's module is code like any other: what it raises is bad input here
        yield f"{option} {path}: loading it raised {type(error).__name__}: {error}."
        return
    if problem := signature_problem(function, protocol):
        yield f"{option} {path} does not fit: {problem}."
