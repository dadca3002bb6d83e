"""The exceptions of what a user can correct and of a request that failed, and sentences that several modules need:
about a variable that says neither yes nor no, an unknown name, a full disk, or a Python without slime's packages.

Whoever raises one writes the whole sentence (value found, flag, remedy). train.py imports this module before anything
else, so it imports nothing that may be missing.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

S = TypeVar("S", bound=str)


class UsageError(ValueError):
    """Input that cannot work, found before anything was started; the entry points print it and exit with status 2.

    Args:
        messages: one sentence or several; each names the value, the flag or file, and the remedy.
    """

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else list(messages)
        super().__init__("\n".join(self.messages))


def sentences(*rows: tuple[object, S]) -> Iterator[S]:
    """Return the sentences of the rows whose condition holds, in order. All of them are made: none may fail to be."""
    return (sentence for holds, sentence in rows if holds)


def refuse(problems: Iterable[str]) -> None:
    """Raise these sentences as one error, if there are any.

    Raises:
        UsageError: there are.
    """
    if messages := list(problems):
        raise UsageError(messages)


def exit_status(work: Callable[[], str]) -> int:
    """Run a tool: print the sentence that it returns, or its UsageError on stderr; returns the status, 0 or 2."""
    try:
        print(work())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class HttpError(RuntimeError):
    """A request that failed for good; `status` is the HTTP status, or None when no answer came."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refused(self) -> bool:
        """Return whether the server has refused the request for good, so that it is no use to send it again."""
        return self.status is not None and self.status < 500


def env_flag(environment: Mapping[str, str], name: str, *, default: str = "false") -> bool:
    """Whether a variable says yes: true or 1, false, 0 or nothing, in any case.

    Raises:
        UsageError: it says something else.
    """
    value = environment.get(name, default).strip().lower()
    if value not in ("true", "1", "false", "0", ""):
        raise UsageError(f"{name}={value}: write true or 1, false or 0")
    return value in ("true", "1")


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.7) -> list[str]:
    """At most three of the known names, none much further from `name` than the nearest.

    Args:
        name: the name that does not exist.
        known: those that do.
        likeness: share of letters that the two must have in common, between 0 and 1.
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=likeness)
    ratio = {other: difflib.SequenceMatcher(None, other, name).ratio() for other in near}
    return [other for other in near if ratio[other] > ratio[near[0]] - 0.1]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: the nearest ones, or a few names in full where none is near."""
    if near := nearest(name, known, likeness=0.6):
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there is no such name."
    shown = sorted(known)
    return f"known are {', '.join(shown[:30])}{', ...' if len(shown) > 30 else ''}."


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


EXIT_USAGE = 2
OLDEST = (3, 11)


@contextmanager
def explain_missing_packages() -> Iterator[None]:
    """End the process with one sentence where an import inside fails because this Python is not slime's."""
    try:
        yield
    except ImportError as error:
        lacks = (error.name or "").partition(".")[0]
        if sys.version_info < OLDEST:
            why = f"is Python {sys.version_info.major}.{sys.version_info.minor}, and slime needs 3.11"
        elif isinstance(error, ModuleNotFoundError) and lacks not in ("slime", "slime_plugins"):
            why = f"has no package {lacks}"
        else:
            raise
        sys.stderr.write(
            f"error: {sys.executable} {why}: bash scripts/setup_env.sh makes .venv, an environment with everything "
            "(--cpu on a machine without a GPU); run this command with .venv/bin/python.\n"
        )
        raise SystemExit(EXIT_USAGE) from None
