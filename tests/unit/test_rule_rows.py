"""Rows of rules: when they speak, and that every value which a sentence names is a flag's."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

from slime.config.args import Args
from slime.config.parse import build_parser
from slime.config.problems import NoEffect, Rule, WithoutEffect, broken, each, first_of, where

CONFIG = Path(__file__).resolve().parents[2] / "slime" / "config"
ARGS = Args.of({"eps_clip": -1, "save": None})


def test_a_rule_fills_its_sentence_with_values() -> None:
    assert list(Rule(lambda a: a.eps_clip < 0, "--eps-clip {eps_clip!r} is bad.")(ARGS)) == ["--eps-clip -1 is bad."]
    assert list(Rule(lambda a: a.eps_clip > 0, "--eps-clip {eps_clip} is bad.")(ARGS)) == []


def test_a_rule_of_given_flags_is_silent_where_one_of_them_is_not_given() -> None:
    rule = Rule(lambda a: True, "both", given="save load")
    assert [list(rule(ARGS, given)) for given in (["save"], ["save", "load"])] == [[], ["both"]]


def test_what_has_no_effect_keeps_what_a_run_without_it_has() -> None:
    row = WithoutEffect(lambda a: True, "--eps-clip {eps_clip}", "with {save}", "leave it out", {"eps_clip": 0.2})
    (sentence,) = row(ARGS)
    assert sentence == "--eps-clip -1 has no effect with None; leave it out."
    assert isinstance(sentence, NoEffect) and sentence.instead == {"eps_clip": 0.2}


def test_rows_inside_where_and_first_of() -> None:
    rows = (Rule(lambda a: False, "a"), Rule(lambda a: True, "b"), Rule(lambda a: True, "c"))
    assert list(broken(rows, ARGS)) == ["b", "c"]
    assert list(first_of(*rows)(ARGS)) == ["b"]
    assert list(where(lambda a: a.save, *rows)(ARGS)) == []
    assert list(where(lambda a: not a.save, *rows)(ARGS)) == ["b", "c"]


def test_each_makes_a_rule_for_each_flag() -> None:
    rows = each("eps_clip save", lambda value: value is None, "{option} {value!r} is none.")
    assert list(broken(rows, ARGS)) == ["--save None is none."]


@pytest.fixture(scope="module")
def attributes() -> set[str]:
    return {action.dest for action in build_parser()._actions}


def _texts(call: ast.Call) -> list[str]:
    """The constant parts of the texts of a row."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "given")]
    nodes = [part for node in arguments for part in (node.values if isinstance(node, ast.JoinedStr) else [node])]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("path", sorted(CONFIG.rglob("*.py")), ids=lambda path: str(path.relative_to(CONFIG)))
def test_every_name_in_the_sentence_of_a_row_is_an_attribute_of_args(path: Path, attributes: set[str]) -> None:
    known = attributes | {"option", "value"}
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    rows = [
        call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Rule", "WithoutEffect", "each")
    ]
    texts = [text for call in rows if path.name != "problems.py" for text in _texts(call) if " " in text]
    names = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    assert names <= known, names - known
