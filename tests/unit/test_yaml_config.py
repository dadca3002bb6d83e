"""YAML files behind flags: what is written is what is read, and every problem names its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from slime.utils.errors import UsageError
from slime.utils.files.yaml_config import FileUnusable, LocatedYaml, dotted, known_keys, load_yaml, validate
from tests.unit.yaml_mutations import edited


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    share: float = Field(1.0, gt=0, le=1)
    kind: Literal["small", "large"] = "small"


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    items: list[Item]
    by_name: dict[str, Item] | None = None
    rounds: int = 1
    verbose: bool = False


def read(tmp_path: Path, text: str, name: str = "conf.yaml", **keywords: bool) -> LocatedYaml:
    path = tmp_path / name
    path.write_text(text)
    return load_yaml(str(path), "--conf", **keywords)


def test_every_part_of_a_file_knows_its_line(tmp_path):
    located = read(tmp_path, "# a comment\nitems:\n  - name: a\n  - {name: b,\n     share: 0.5}\nrounds: 2\n")
    assert located.value == {"items": [{"name": "a"}, {"name": "b", "share": 0.5}], "rounds": 2}
    assert {dotted(path): line for path, line in located.lines.items() if path} == {
        "items": 2,
        "items[0]": 3,
        "items[0].name": 3,
        "items[1]": 4,
        "items[1].name": 4,
        "items[1].share": 5,
        "rounds": 6,
    }


def test_values_are_what_they_look_like(tmp_path):
    text = "[1e-6, 1E5, -2, 0x10, 1_000, .5, 007, 12:30, 2024-01-01, true, null, '1', on]"
    read_values = read(tmp_path, text).value
    expected = [1e-6, 1e5, -2, 16, 1000, 0.5, "007", "12:30", "2024-01-01", True, None, "1", True]
    assert read_values == expected and [type(v) for v in read_values] == [type(v) for v in expected]


def test_keys_are_texts_as_they_are_written(tmp_path):
    assert read(tmp_path, "2024: 1\non: 2\n1e3: 3\n").value == {"2024": 1, "on": 2, "1e3": 3}


def test_json_is_read_with_tabs_pairs_and_lines(tmp_path):
    value = {"items": [{"name": "a/\U0001f600\n", "share": 1e-3}], "rounds": 2}
    located = read(tmp_path, json.dumps(value, indent="\t"), "conf.json")
    assert located.value == value and located.lines[("items", 0, "share")] == 5


def test_merge_keys_give_way_to_a_mappings_own(tmp_path):
    located = read(tmp_path, "base: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}\n")
    assert located.value["more"] == {"x": 1, "y": 3}


def test_environment_variables_stand_there_as_if_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARE", "0.25")
    text = "a: ${oc.env:SHARE}\nb: '${oc.env:SHARE}'\nc: x/${oc.env:SHARE}/${oc.env:NO_SUCH, y}\n"
    assert read(tmp_path, text, interpolates=True).value == {"a": 0.25, "b": "0.25", "c": "x/0.25/y"}
    assert read(tmp_path, text).value["a"] == "${oc.env:SHARE}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [", r"conf.yaml:2:5 is no valid YAML"),
        ("a:\n\tb: 1\n", r"conf.yaml:2:1 is no valid YAML: found a tab; indent with spaces"),
        ("a: 1\nb: 2\na: 3\n", r"conf.yaml:3: the key 'a' is there twice, first in line 1"),
        (
            "a: 1\nb: !!python/object/apply:os.system [ls]\n",
            r"conf.yaml:2: b: the tag !!python/object/apply:os.system",
        ),
        ("a: !!int x\n", r"conf.yaml:1: a: 'x' is no int"),
        ("a: !!int ''\n", r"conf.yaml:1: a: '' is no int"),
        ("a: " + "9" * 5000, r"conf.yaml:1: a: '9+\.\.\. is no int"),
        ("? [1]\n: 2\n", r"conf.yaml:1: a key must be a text"),
        ("a: &a [*a]\n", r"conf.yaml:1: .*an alias that contains itself"),
        ("a: &a\n  <<: *a\n", r"nested too deeply|contains itself"),
        ("[" * 3000, r"nested too deeply"),
        ('a: "\\Uffffffff"\n', r"is no valid YAML"),
        ('a: "\\ud800"\n', r"conf.yaml:1: a: half a surrogate pair"),
        ("a: \x01\n", r"conf.yaml:1:4 is no valid YAML: the character '\\x01' is not allowed"),
        ("a: 1\n---\nb: 2\n", r"conf.yaml:2:1 is no valid YAML"),
        ("a: ${oc.env:NO_SUCH}", r"conf.yaml:1: a: .*the environment variable NO_SUCH is not set"),
        ("a: 1\nb: ${a}", r"conf.yaml:2: b: \$\{a\} is not supported, only \$\{oc.env:NAME\}"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_place(tmp_path, text, message):
    with pytest.raises(UsageError, match=message) as error:
        read(tmp_path, text, interpolates=True)
    assert str(error.value).count("conf.yaml") == 1, "it says so once"


def test_aliases_cannot_grow_without_limit(tmp_path):
    lines = ["a0: &a0 [1, 1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(UsageError, match="too many values"):
        read(tmp_path, "\n".join(lines))


def test_a_file_that_is_not_there_is_told_apart_from_a_wrong_one(tmp_path):
    for path in (str(tmp_path / "none.yaml"), str(tmp_path), "a\0b"):
        with pytest.raises(FileUnusable, match="--conf"):
            load_yaml(path, "--conf")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(UsageError, match="byte 3 is not UTF-8") as raised:
        load_yaml(str(tmp_path / "latin.yaml"), "--conf")
    assert not isinstance(raised.value, FileUnusable)


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = (
        "items:\n"
        "  - share: 2\n"
        "  - name: 7\n"
        "    knd: small\n"
        "    kind: huge\n"
        "by_name:\n"
        "  x: {nam: y}\n"
        "rounds: 1.5\n"
        "verbose: 1\n"
    )
    located = read(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        validate(Config, located)
    start = f"--conf {located.file}"
    assert raised.value.messages == [
        f"{start}:2: items[0].name: is missing.",
        f"{start}:2: items[0].share: 2 must be <= 1.",
        f"{start}:3: items[1].name: 7 is not a text; put it in quotes.",
        f"{start}:4: items[1].knd: unknown key; did you mean kind?",
        f"{start}:5: items[1].kind: 'huge' is none of 'small', 'large'.",
        f"{start}:7: by_name.x.name: is missing.",
        f"{start}:7: by_name.x.nam: unknown key; did you mean name?",
        f"{start}:8: rounds: 1.5 is not a whole number.",
        f"{start}:9: verbose: 1 is not true or false.",
    ]


def test_a_right_file_becomes_the_model(tmp_path):
    config = validate(Config, read(tmp_path, "items: [{name: a, share: 1}]\nrounds: 3\n"))
    assert config == Config(items=[Item(name="a", share=1.0)], rounds=3)


@pytest.mark.parametrize("text", ["", "3", "[1]", "null"])
def test_a_file_without_keys_is_told_what_it_needs(tmp_path, text):
    with pytest.raises(UsageError, match="is no mapping; it needs keys of items, by_name, rounds, verbose"):
        validate(Config, read(tmp_path, text))


def test_known_keys_follow_lists_mappings_and_options():
    assert known_keys(Config, ("items", 0)) == known_keys(Config, ("by_name", "x")) == ["name", "share", "kind"]
    assert known_keys(Config, ("rounds", "x")) == known_keys(Config, ("nothing",)) == []


VALID = "items:\n  - {name: a, share: 0.5}\n  - name: b\n    kind: large\nby_name: &m\n  x: {name: y}\nrounds: 2\n"
PIECES = st.sampled_from([*"{}[]:,-&*!|>%@`'\"#?\t\n ", "<<: *m", "!!int", "\x00", "1e999", ".nan", "\ud7ff", "null"])


@settings(max_examples=100, deadline=None)
@given(text=edited(VALID, PIECES))
def test_a_mutated_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text(text)
    try:
        validate(Config, load_yaml(str(path), "--conf", interpolates=True))
    except UsageError as error:
        assert all(message.startswith("--conf ") for message in error.messages)
