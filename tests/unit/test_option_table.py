"""Options written down and added again: the same to the user, without the package behind them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slime.config import option_table
from slime.config.option_table import OptionTable, cached_table, capture, capture_elsewhere
from slime.config.parser import Parser
from slime.utils.errors import UsageError


def fill_plain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alone", help="in no group of its own")
    group = parser.add_argument_group("First", "what it is about")
    group.add_argument("--number", "--num", type=int, default=3, help="a number")
    group.add_argument("--ratio", type=float, required=False, metavar="R")
    group.add_argument("--mode", choices=("fast", "slow"), default="fast")
    group.add_argument("--order", choices={"b", "a"}, help="from a set")
    group.add_argument("--many", type=int, nargs="+", default=[1, 2], dest="list_of_many")
    group.add_argument("--maybe", nargs="?", const="given", default="absent")
    other = parser.add_argument_group("Second")
    other.add_argument("--on", action="store_true", help="%(default)s at first")
    other.add_argument("--no-off", dest="off", action="store_false")
    other.add_argument("--both", action=argparse.BooleanOptionalAction, default=None)
    other.add_argument("--as-b", action="store_const", const="b", dest="order")
    other.add_argument("--again", action="append", type=json.loads)
    other.add_argument("-v", action="count", default=0)
    other.add_argument("--map", default={})
    other.add_argument("--old-number", type=int, dest="number", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def read_again(table: OptionTable) -> OptionTable:
    """The table after a file."""
    return OptionTable(json.loads(json.dumps(table.options)), table._live)


LINES = [
    "",
    "--alone x --num 4 --ratio 0.5 --mode slow --order a --many 7 8 --maybe",
    "--on --no-off --no-both --as-b --again 1 --again {} -vv --map z",
    "--both --maybe set --old-number 9",
]


@pytest.mark.parametrize("line", LINES)
def test_a_table_from_a_file_parses_as_the_package_does(line: str) -> None:
    theirs, ours = Parser(), Parser()
    fill_plain(theirs)
    read_again(capture(fill_plain)).add_to(ours)
    assert ours.parse_args(line.split()) == theirs.parse_args(line.split())


SET_ORDER = ", ".join(map(repr, {"b", "a"}))  # differs from process to process; a table sorts


@pytest.mark.parametrize("line", ["--number x", "--mode other", "--again {", "--many", "--order c"])
def test_a_table_from_a_file_refuses_with_the_same_words(line: str) -> None:
    theirs, ours = Parser(), Parser()
    fill_plain(theirs)
    read_again(capture(fill_plain)).add_to(ours)
    messages = []
    for parser in (theirs, ours):
        messages.append(parser.parse_all(line.split(), argparse.Namespace(), explain_unknown=lambda name: None))
    assert messages[0] and messages[0] == [sentence.replace("'a', 'b'", SET_ORDER) for sentence in messages[1]]


def test_help_is_the_same_but_for_the_order_of_a_set() -> None:
    theirs, ours = Parser(), Parser()
    fill_plain(theirs)
    read_again(capture(fill_plain)).add_to(ours)
    assert ours.format_help() == theirs.format_help().replace("{b,a}", "{a,b}")


def test_an_option_that_the_parser_has_stays_what_it_is() -> None:
    parser = Parser()
    parser.add_argument("--number", default="mine")
    capture(fill_plain).add_to(parser)
    args = parser.parse_args(["--number", "text", "--num", "5"])
    assert args.number == 5, "the name that was free reads a number into the same attribute"
    assert parser.parse_args(["--number", "text"]).number == "text"


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (lambda parser: parser.add_argument("--x", default=object()), "option --x .* no plain value"),
        (lambda parser: parser.add_argument("--x", choices=[b"x"]), "option --x .* no plain value"),
        (lambda parser: parser.add_argument("--x", default=(1, "x")), "option --x .* no plain value"),
        (lambda parser: parser.add_argument("x"), "positional argument x"),
        (lambda parser: parser.add_mutually_exclusive_group().add_argument("--x"), "exclude each other"),
    ],
)
def test_what_cannot_be_written_down_is_refused_by_name(
    fill: Callable[[argparse.ArgumentParser], object], reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        capture(fill)


PACKAGE = """
import argparse

def shout(text):
    if not text.isalpha():
        raise ValueError(text)
    return text.upper()

class Twice(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, [option_string, values, values])

def fill(parser):
    parser.add_argument("--shout", type=shout)
    parser.add_argument("--twice", "--twofold", type=int, action=Twice)
    parser.add_argument("--double", type=lambda text: 2 * int(text))
    print("a package may print")
"""
FILLER = """
def fill(parser):
    import slow_package
    slow_package.fill(parser)

def broken(parser):
    import no_such_module
"""


@pytest.fixture
def filler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A module that asks a package which is not imported yet."""
    (tmp_path / "slow_package.py").write_text(PACKAGE)
    (tmp_path / "slow_filler.py").write_text(FILLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_filler  # type: ignore[import-not-found]

    yield slow_filler
    for name in ("slow_package", "slow_filler"):
        sys.modules.pop(name, None)


def test_the_package_is_imported_only_for_a_value_that_needs_it(filler) -> None:  # type: ignore[no-untyped-def]
    parser = Parser()
    parser.add_argument("--other")
    capture_elsewhere(filler.fill).add_to(parser)
    assert "--twice INT, --twofold INT" in parser.format_help()
    options = parser.options()
    assert options["--shout"].type.__name__ == "shout" and options["--double"].type.__name__ == "value"
    assert "slow_package" not in sys.modules
    args = parser.parse_args(["--double", "4", "--twofold", "3"])
    assert "slow_package" in sys.modules
    assert (args.double, args.twice, args.shout) == (8, ["--twofold", 3, 3], None)
    problems = parser.parse_all(["--shout", "a1"], argparse.Namespace(), explain_unknown=lambda name: None)
    assert problems == ["--shout: invalid shout value: 'a1'"]


def test_a_package_that_cannot_be_imported_is_one_sentence(filler) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="importing it fails: ModuleNotFoundError: No module named 'no_such_module'"):
        capture_elsewhere(filler.broken)


class Builder:
    """Counts how often a table is built."""

    def __init__(self) -> None:
        self.calls = 0

    def fill(self, parser: argparse.ArgumentParser) -> None:
        self.calls += 1
        fill_plain(parser)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIME_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_table_is_built_once_for_each_version_and_each_state_of_the_code(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder()
    tables = [cached_table("t", {"package": version}, builder.fill) for version in ("1", "1", "2", "1")]
    assert builder.calls == 2
    assert all(table.options == tables[0].options for table in tables)
    monkeypatch.setattr(option_table, "code_hash", lambda build: "other code")
    cached_table("t", {"package": "1"}, builder.fill)
    assert builder.calls == 3
    assert len(list(cache.iterdir())) == 3, "a file each, and nothing left over"


def test_a_table_that_takes_a_while_to_make_is_announced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(2):
            cached_table("t", {}, Builder().fill)
    assert [text for text in caplog.messages if "asking the installed t for its options" in text] == caplog.messages[
        :1
    ]


def test_the_code_of_the_builder_is_part_of_the_key(filler, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    before = option_table.code_hash(filler.fill)
    assert option_table.code_hash(filler.fill) == before
    (tmp_path / "slow_filler.py").write_text(FILLER + "\n")
    assert option_table.code_hash(filler.fill) != before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}, "options": []}', "\xff\xfe", '{"options": 3}'])
def test_a_damaged_file_is_made_again(cache: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    builder = Builder()
    table = cached_table("t", {}, builder.fill)
    (file,) = cache.iterdir()
    good = file.read_text()
    file.write_bytes(damage.encode("latin-1"))
    assert cached_table("t", {}, builder.fill).options == table.options
    assert builder.calls == 2 and file.read_text() == good
    assert caplog.text.count("cannot be used and are made again") == 1


def test_options_with_unknown_fields_are_made_again(cache: Path) -> None:
    builder = Builder()
    cached_table("t", {}, builder.fill)
    (file,) = cache.iterdir()
    content = json.loads(file.read_text())
    content["options"][0]["colour"] = "red"
    file.write_text(json.dumps(content))
    cached_table("t", {}, builder.fill)
    assert builder.calls == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SLIME_CACHE_DIR", str(tmp_path / "file" / "cache"))
    option_table._warn_once.cache_clear()
    builder = Builder()
    assert [len(cached_table("t", {}, builder.fill).options) for _ in range(2)] == [15, 15]
    assert builder.calls == 2
    (record,) = caplog.records
    assert "cache cannot be written (Not a directory)" in record.getMessage()


def test_processes_that_start_together_all_get_a_table(cache: Path) -> None:
    def one(_: int) -> int:
        return len(cached_table("t", {}, Builder().fill).options)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(64))) == [15] * 64
    (file,) = cache.iterdir()
    assert len(json.loads(file.read_text())["options"]) == 15


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("SLIME_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert option_table.cache_dir() == Path("/home/me/.cache/slime")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert option_table.cache_dir() == Path("/shared/slime")
    monkeypatch.setenv("SLIME_CACHE_DIR", "/here")
    assert option_table.cache_dir() == Path("/here")
