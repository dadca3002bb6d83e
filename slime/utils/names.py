"""What to say about a name that does not exist. It knows no names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


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
