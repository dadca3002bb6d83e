"""Errors of user functions, named after the function: whatever a hook raises, the run reports which one it was.

A hook may also call `sys.exit()` or raise a CancelledError. Left alone, the first ends the thread of the event loop
and the second looks as if slime had cancelled the work. Both are errors of the hook, like any other exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.utils.async_utils import is_cancellation
from slime.utils.errors import UsageError


class HookError(RuntimeError):
    """A user's function failed, or returned what cannot be used; the message names it."""


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
        raise HookError(f"{name} failed: {type(error).__name__}: {error}") from error


def must_pass(error: BaseException) -> bool:
    """Whether an error is not the hook's: it cancels the running task, or it is how Ray ends this process."""
    return is_cancellation(error) or hasattr(error, "ray_terminate_msg")
