"""Random command lines end in args or in sentences, never in a traceback.

The parser is built once for all lines.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from slime.config.parse import CommandLine, build_parser
from tests.unit.argument_mutations import base_lines, mutate, write_files


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine()


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return sorted(name for name in build_parser().options() if name.startswith("--"))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_line(command_line: CommandLine, words: list[str]) -> bool:
    """Check one line; returns whether it would run.

    Raises:
        AssertionError: a sentence is none, or a whole traceback.
    """
    checked = command_line.check(words)
    sentences = checked.problems.all()
    for sentence in sentences:
        assert sentence.strip() and "Traceback" not in sentence, sentence
    assert checked.args.is_frozen
    return not sentences


def test_the_unchanged_lines_work(command_line: CommandLine) -> None:
    for words in base_lines():
        assert check_line(command_line, words), command_line.check(words).problems.all()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(random=st.randoms())
def test_random_mutations_end_in_args_or_in_sentences(
    command_line: CommandLine, flags: list[str], random: Random
) -> None:
    check_line(command_line, mutate(random.choice(base_lines()), random, flags))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms())
def test_10000_random_mutations_end_in_args_or_in_sentences(
    command_line: CommandLine, flags: list[str], random: Random
) -> None:
    check_line(command_line, mutate(random.choice(base_lines()), random, flags))


def test_mutations_are_neither_all_harmless_nor_all_fatal(command_line: CommandLine, flags: list[str]) -> None:
    lines = [mutate(base_lines()[0], Random(seed), flags) for seed in range(60)]
    assert 0 < sum(check_line(command_line, words) for words in lines) < 60


def test_checking_leaves_nothing_on_disk(command_line: CommandLine, flags: list[str], files: Path) -> None:
    before = sorted(os.listdir(files))
    for seed in range(50):
        command_line.check(mutate(base_lines()[2], Random(seed), flags))
    assert [name for name in sorted(os.listdir(files)) if name != "__pycache__"] == before
