"""The page of every flag is what the parser says."""

from __future__ import annotations

from tools.make_flag_reference import DEFAULT_OUTPUT, render


def test_the_page_of_flags_is_up_to_date() -> None:
    assert DEFAULT_OUTPUT.read_text() == render(), "stale: run python tools/make_flag_reference.py"
