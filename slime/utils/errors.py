"""The exception for input that a user can correct, and the one for a request that failed.

It knows nothing about flags, files or servers: whoever raises one writes the whole sentence (value found, flag,
remedy).
"""

from __future__ import annotations

from typing import Any


class UsageError(ValueError):
    """Input that cannot work, found before anything was started; the entry points print it and exit with status 2.

    Args:
        messages: one sentence or several; each names the value, the flag or file, and the remedy.
    """

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type[UsageError], tuple[list[str]]]:
        return type(self), (self.messages,)  # Exception would pickle the joined text, and Ray pickles exceptions


class HttpError(RuntimeError):
    """A request that failed for good; `status` is the HTTP status, or None when no answer came."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> Any:
        return _rebuild_http_error, (str(self), self.status)  # Ray pickles errors; keyword arguments would be lost


def _rebuild_http_error(message: str, status: int | None) -> HttpError:
    return HttpError(message, status=status)
