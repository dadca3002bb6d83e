"""How an error says that a disk is full, a quota used up or a file larger than it may be. It does nothing about it."""

from __future__ import annotations

WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


def is_of_full_disk(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that a disk is full."""
    return line_of_full_disk(error) is not None


def line_of_full_disk(error: BaseException) -> str | None:
    """The line of an error, or of one behind it, that says that a disk is full; None where none does."""
    return next((line.strip() for line in said(error).splitlines() if any(word in line for word in WORDS)), None)


def said(error: BaseException) -> str:
    """What an error says, and what those behind it say."""
    behind = error.__cause__ or error.__context__
    return f"{error}\n{said(behind)}" if behind else f"{error}"
