"""Flags of slime that are declared but whose feature is not built yet: which they are, and what a use of one is told.

A flag says so itself (`later=`, `later_choices=` of `flags.flag`); this module only reads it. Such a flag appears in
`--help` and in the plan of `--dry-run`, and a run that sets it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from slime.config.args import Args
from slime.config.parser import defaults_of, option_name

Field = dataclasses.Field[Any]


def unsupported_flags(flags_classes: Iterable[type]) -> Iterator[tuple[str, str]]:
    """(flag or "flag value", topic) of everything that is declared but not built, in the order of `--help`."""
    for flags_class in flags_classes:
        for field in dataclasses.fields(flags_class):
            if field.metadata["later"]:
                yield option_name(field), field.metadata["later"]
            for value, topic in field.metadata["later_choices"].items():
                yield f"{option_name(field)} {value}", topic


def unsupported_uses(args: Args, explicit: set[str], flags_classes: Iterable[type]) -> Iterator[str]:
    """One sentence for each flag that was given a value which is not built yet."""
    for flags_class in flags_classes:
        defaults = defaults_of(flags_class)
        for field in dataclasses.fields(flags_class):
            value = vars(args)[field.name]
            if field.name in explicit and value != defaults[field.name]:
                yield from _sentence(field, value)


def topic_of(field: Field) -> str | None:
    """The work that will build a flag, or some of its values; None where all of it works."""
    by_choice = field.metadata["later_choices"]
    if by_choice:
        return ", ".join(f"{value}: {topic}" for value, topic in by_choice.items())
    topic: str | None = field.metadata["later"]
    return topic


def _sentence(field: Field, value: Any) -> Iterator[str]:
    later, by_choice = field.metadata["later"], field.metadata["later_choices"]
    if later:
        yield f"{option_name(field)} is not supported yet ({later}); leave it out."
    for given in value if isinstance(value, list) else [value]:
        if by_choice and given in by_choice:
            rest = [str(choice) for choice in field.metadata["choices"] or () if choice not in by_choice]
            remedy = f"use {' or '.join(rest)}" if rest else "leave it out"
            yield f"{option_name(field)} {given} is not supported yet ({by_choice[given]}); {remedy}."
