"""Errors of user functions, named after the function: whatever a hook raises, the run reports which one it was.

A hook may also call `sys.exit()` or raise a CancelledError. Left alone, the first ends the thread of the event loop
and the second looks as if slime had cancelled the work. Both are errors of the hook, like any other exception.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from slime.utils.async_utils import is_cancellation
from slime.utils.errors import UsageError

_KINDS = (TypeError, ValueError, AssertionError)


class HookError(RuntimeError):
    """A user's function failed, or returned what cannot be used; the message names it.

    It is also the TypeError, ValueError or AssertionError that callers of such functions expect (`as_kind`).
    """


E = TypeVar("E", bound=HookError)


def as_kind(base: type[E], *kinds: type[Exception]) -> type[E]:
    """Return the class of errors that are a `base` and also of all `kinds`; it is called as `base` is."""
    return cast(type[E], _class_of_all((base, *(kind for kind in kinds if not issubclass(base, kind)))))


@functools.cache
def _class_of_all(classes: Any) -> Any:
    base, *kinds = classes
    # Ray pickles errors, and a class made here has no name that another process could look up.
    names = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__reduce__": lambda error: (_rebuild, (classes, error.args), vars(error)),
    }
    return type(base.__name__, classes, names) if kinds else base


def _rebuild(classes: tuple[type[Exception], ...], texts: tuple[str, ...]) -> Any:
    return _class_of_all(classes)(*texts)


def as_kind_of(base: type[E], error: BaseException) -> type[E]:
    """Return the class of errors that are a `base` and also what `error` is, if that is one of the usual kinds."""
    return as_kind(base, *(kind for kind in _KINDS if isinstance(error, kind)))


def hook_name(path: str) -> str:
    """A hook path as module:function, whichever way it was written."""
    module, colon, attribute = path.rpartition(":")
    if not colon:
        module, _, attribute = path.rpartition(".")
    return f"{module}:{attribute}"


@contextmanager
def blame_hook(name: str, *, only_exits: bool = False) -> Iterator[None]:
    """Raise what is raised inside as a HookError that names the function; for hooks that are not about one sample.

    Args:
        name: flag and function, for the error.
        only_exits: pass on every `Exception` as it is: slime's own function stands there, and its errors say enough.
    """
    try:
        yield
    except (HookError, UsageError):
        raise
    except BaseException as error:
        if must_pass(error) or (only_exits and isinstance(error, Exception)):
            raise
        text = f"{name} failed: {type(error).__name__}: {error}"
        raise as_kind_of(HookError, error)(text) from error


def must_pass(error: BaseException) -> bool:
    """Whether an error is not the hook's: it cancels the running task, or it is how Ray ends this process."""
    return is_cancellation(error) or hasattr(error, "ray_terminate_msg")
