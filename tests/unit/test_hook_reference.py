"""The page of every hook is what the Protocols say, and each Protocol says all that the page needs."""

from __future__ import annotations

import pytest

from slime.rollout.base_types import HOOKS
from tools.make_hook_reference import DEFAULT_OUTPUT, WITHOUT, option_of, parts_of, render


def test_the_page_of_hooks_is_up_to_date() -> None:
    assert DEFAULT_OUTPUT.read_text() == render(), "stale: run python tools/make_hook_reference.py"


def test_every_hook_has_its_section() -> None:
    page = DEFAULT_OUTPUT.read_text()
    headings = [line for line in page.splitlines() if line.startswith("## `")]
    assert sorted(attribute for attribute in HOOKS for line in headings if f"`{option_of(attribute)}`" in line) == (
        sorted(HOOKS)
    )


@pytest.mark.parametrize("protocol", dict.fromkeys(HOOKS.values()))
def test_a_protocol_says_what_it_is_for_when_it_is_called_and_what_comes_back(protocol: type) -> None:
    parts = parts_of(protocol)
    assert set(parts) == {"summary", "Called", "Returns"}
    assert all(text.endswith(".") for text in parts.values()), parts


def test_what_stands_in_for_a_hook_is_said_of_hooks_only() -> None:
    assert set(WITHOUT) < set(HOOKS)
