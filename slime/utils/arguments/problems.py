"""What is wrong with a command line, in three kinds that differ in what can still be said about the run.

It holds sentences and knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime.utils.errors import UsageError
from slime.utils.yaml_config import FileUnusable

T = TypeVar("T")


@dataclass
class Problems:
    """Sentences about one command line; a run starts only when there are none.

    Attributes:
        wrong: it contradicts itself or cannot be read, so nothing can be planned.
        environment: what it points at is missing or unusable here: files, hooks, ports, devices.
        unsupported: it asks for something that is not built yet.
    """

    wrong: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        """Every sentence once, in the order of the kinds."""
        return list(dict.fromkeys([*self.wrong, *self.environment, *self.unsupported]))

    def extend(self, other: Problems) -> None:
        """Add the sentences of another."""
        self.wrong += other.wrong
        self.environment += other.environment
        self.unsupported += other.unsupported

    def beside(self, other: Problems, what: str) -> Problems:
        """The sentences that the other has not, each behind `what` it is about."""

        def own(kind: list[str], known: list[str]) -> list[str]:
            return [f"{what}: {sentence}" for sentence in kind if sentence not in known]

        return Problems(
            own(self.wrong, other.wrong),
            own(self.environment, other.environment),
            own(self.unsupported, other.unsupported),
        )


def read_file(problems: Problems, function: Callable[..., T], *args: Any) -> T | None:
    """Call a function that reads a file of settings; None where it cannot.

    A file that is not there says nothing about the command line, so that goes to `problems.environment`; what is
    wrong in it goes to `problems.wrong`.
    """
    try:
        return function(*args)
    except FileUnusable as error:
        problems.environment += error.messages
    except UsageError as error:
        problems.wrong += error.messages
    return None


def collected(kind: list[str], function: Callable[..., T], *args: Any, **keywords: Any) -> T | None:
    """Call a function; what its UsageError says goes to `kind`, one of a Problems' lists, and None is returned."""
    try:
        return function(*args, **keywords)
    except UsageError as error:
        kind += error.messages
        return None


def without_repeats(sentences: Iterable[str], earlier: Iterable[str]) -> list[str]:
    """Drop sentences about flags that an earlier sentence names: they are wrong only because those were not parsed."""

    def flags_in(sentence: str) -> set[str]:
        return {word.strip(":,.?") for word in sentence.split() if word.startswith("--")}

    named = {flag for sentence in earlier for flag in flags_in(sentence)}
    return [sentence for sentence in sentences if not named & flags_in(sentence)]
