"""Dataclass fields as command-line flags, and the parser that reports every problem of a line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from slime.config.parser import Parser, add_flags, defaults_of, explicit_flags, flag, group_title


@dataclass
class Flags:
    """Example. Flags of every kind."""

    count: int | None = flag(None, "a number")
    size: float = flag(0.5, "a size")
    switch: bool = flag(False, "off unless given")
    wanted: bool = flag(True, "on unless disabled")
    maybe: bool | None = flag(None, "three states")
    names: list[str] | None = flag(None, "several", nargs="+")
    hooks: list[str] = flag([], "repeatable", repeatable=True)
    extra: dict[str, Any] = flag({}, "JSON", is_json=True)
    kind: str = flag("a", "one of two", choices=("a", "b"))


def parse(line: str) -> tuple[argparse.Namespace, list[str]]:
    parser, args = Parser(prog="train.py"), argparse.Namespace()
    add_flags(parser, Flags)
    return args, parser.parse_all(line.split(), args, explain_unknown=lambda name: None)


def test_defaults_are_those_of_the_dataclass() -> None:
    args, problems = parse("")
    assert vars(args) == defaults_of(Flags) and problems == []


def test_every_kind_of_flag_is_read() -> None:
    line = "--count -3 --size=2 --switch --disable-wanted --no-maybe --names x y --hooks a --hooks b --kind b"
    args, problems = parse(line + ' --extra {"k":[1]}')
    assert problems == []
    assert vars(args) == {
        "count": -3,
        "size": 2.0,
        "switch": True,
        "wanted": False,
        "maybe": False,
        "names": ["x", "y"],
        "hooks": ["a", "b"],
        "extra": {"k": [1]},
        "kind": "b",
    }


def test_repeatable_flags_do_not_share_their_default() -> None:
    parse("--hooks a")
    assert parse("--hooks b")[0].hooks == ["b"]


def test_all_problems_of_a_line_are_returned() -> None:
    args, problems = parse("--count x --kind c --extra {] --names --swich --size 3 stray")
    assert problems == [
        "--count: invalid int value: 'x'",
        "--kind: invalid choice: 'c' (choose from 'a', 'b')",
        "--extra: '{]' is no JSON: Expecting property name enclosed in double quotes at column 2",
        "--names: expected at least one argument",
        "unknown flag --swich: did you mean --switch?",
        "'stray' belongs to no flag; write the flag's name before it, and quote a value with spaces.",
    ]
    assert args.size == 3.0, "what is right is still read"


def test_the_value_of_a_misspelt_flag_is_no_problem_of_its_own_though_another_flag_has_the_same() -> None:
    assert parse("--size 3 --sise 3")[1] == ["unknown flag --sise: did you mean --size?"]
    assert parse("--sise 3 --size 3 3")[1] == [
        "unknown flag --sise: did you mean --size?",
        "'3' belongs to no flag; write the flag's name before it, and quote a value with spaces.",
    ]


@pytest.mark.parametrize("token", ["--swi", "--switc", "--nam"])
def test_names_cannot_be_abbreviated(token: str) -> None:
    assert parse(token)[1][0].startswith(f"unknown flag {token}")


def test_the_value_of_an_unknown_flag_is_not_a_second_problem() -> None:
    assert parse("--colour red")[1] == ["unknown flag --colour: see --help for all flags."]
    assert parse("--kind b --kin b --size 3")[1] == ["unknown flag --kin: did you mean --kind?"]


def test_explicit_names_the_attributes_on_the_line() -> None:
    parser = Parser()
    add_flags(parser, Flags)
    assert explicit_flags(parser, ["--size=2", "--no-maybe", "--disable-wanted", "--unknown", "1"]) == {
        "size",
        "maybe",
        "wanted",
    }


def test_help_is_grouped_and_shows_types_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parser = Parser(prog="train.py")
    add_flags(parser.add_argument_group(*group_title(Flags)), Flags)
    lines = [" ".join(text.split()) for text in parser.format_help().splitlines()]
    assert "Example:" in lines and "Flags of every kind." in lines
    assert "--size FLOAT a size (default: 0.5)" in lines
    assert "--count INT a number" in lines
    assert "--kind {a,b} one of two (default: a)" in lines
    assert all(len(text) <= 100 for text in parser.format_help().splitlines())


def test_a_flag_without_an_attribute_is_not_among_the_given_attributes() -> None:
    parser = Parser()
    parser.add_argument("--number", type=int)
    parser.add_argument("--gone", dest=argparse.SUPPRESS, action="store_true")
    assert explicit_flags(parser, ["--number=3", "--gone"]) == {"number"}
