"""The one exception for input that a user can correct.

It knows nothing about flags or files: whoever raises it writes the whole sentence (value found, flag, remedy).
"""

from __future__ import annotations


class UsageError(Exception):
    """Input that cannot work, found before anything was started; the entry points print it and exit with status 2.

    Args:
        messages: one sentence or several; each names the value, the flag or file, and the remedy.
    """

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type[UsageError], tuple[list[str]]]:
        return type(self), (self.messages,)  # Exception would pickle the joined text, and Ray pickles exceptions
