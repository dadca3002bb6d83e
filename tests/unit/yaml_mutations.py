"""Random edits of a text, for the tests that a file behind a flag is read or refused in words."""

from __future__ import annotations

import hypothesis.strategies as st


def edited(valid: str, pieces: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts made of `valid` by at most five edits, each of which puts a piece in the place of up to eight letters."""
    edits = st.lists(st.tuples(st.integers(0, len(valid)), st.integers(0, 8), pieces), max_size=5)
    return edits.map(lambda chosen: _apply(valid, chosen))


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    return text
