"""The page of every flag is what the parser says."""

from __future__ import annotations

import pytest

from slime.config.parse import CommandLine
from tools.make_flag_reference import DEFAULT_OUTPUT, render


def test_the_page_of_flags_is_up_to_date() -> None:
    assert DEFAULT_OUTPUT.read_text() == render(), "stale: run python tools/make_flag_reference.py"


@pytest.mark.parametrize(
    ("option", "ours", "upstreams"),
    [
        ("--lr-decay-style", "constant", "linear"),
        ("--hidden-dropout", 0.0, 0.1),
        ("--attention-dropout", 0.0, 0.1),
        ("--position-embedding-type", "rope", "learned_absolute"),
        ("--transformer-impl", "local", "transformer_engine"),
    ],
)
def test_help_names_both_defaults_where_upstreams_is_another(option: str, ours: object, upstreams: object) -> None:
    action = CommandLine().parser.options()[option]
    assert action.default == ours
    assert f"(default: {ours}; upstream's: {upstreams})" in (action.help or "")


def test_help_says_that_upstream_accepts_a_top_k_that_is_refused_here() -> None:
    assert "only -1 with the policy loss, whose trainer could not replay another (upstream accepts it)" in (
        CommandLine().parser.options()["--rollout-top-k"].help or ""
    )
