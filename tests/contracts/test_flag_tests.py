"""Every flag of slime has a test that fails when the flag is ignored.

flag_tests.tsv names them: a flag and a test (a path below tests/ and a function), one or more rows a flag. What
counts is something that others see: a request, a file, a metric, a schedule, a value that other code reads, a refusal.
A test that only reads back what it parsed does not count. Whether a row deserves its place is for its reader to judge;
here is checked that the table is complete, that its tests exist, and that they speak of their flag. No test is run.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import functools
import re
from pathlib import Path

from slime.config.parse import FLAG_CLASSES
from slime.config.parser import option_name
from slime.config.sglang.engine_flags import SglangFlags

TESTS = Path(__file__).resolve().parents[1]
FIELDS = {option_name(field): field for flags in (*FLAG_CLASSES, SglangFlags) for field in dataclasses.fields(flags)}

with (Path(__file__).parent / "flag_tests.tsv").open() as file:
    ROWS = [(row["flag"], row["test"]) for row in csv.DictReader(file, delimiter="\t")]


@functools.cache
def definitions(path: Path) -> dict[str, str]:
    """Name -> source, decorators included, of everything that a test file defines at its top level."""
    lines, found = path.read_text().splitlines(), {}
    for node in ast.parse("\n".join(lines)).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        decorators: list[ast.expr] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names, decorators = [node.name], node.decorator_list
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        found |= dict.fromkeys(names, "\n".join(lines[first - 1 : node.end_lineno]))
    return found


def text_of(path: Path, name: str) -> str:
    """The source of a test with the tables, helpers and fixtures of its file that it uses, and those that they use."""
    known, seen, waiting = definitions(path), set[str](), [name]
    while waiting:
        current = waiting.pop()
        if current in known and current not in seen:
            seen.add(current)
            waiting += re.findall(r"\w+", known[current])
    return "\n".join(known[one] for one in sorted(seen))


def speaks_of(text: str, option: str) -> bool:
    """Whether a source names a flag by its option or by its attribute."""
    names = [re.escape(option), re.escape(FIELDS[option].name)]
    return any(re.search(rf"(?<![\w-]){name}(?![\w-])", text) for name in names)


def problem_of(option: str, test: str) -> str | None:
    """Return what is wrong with a row, None where nothing is."""
    file, _, name = test.partition("::")
    if option not in FIELDS:
        return "there is no such flag"
    if not name.startswith("test_") or name not in definitions(TESTS / file):
        return "there is no such test"
    return None if speaks_of(text_of(TESTS / file, name), option) else "the test does not speak of its flag"


def test_every_flag_has_a_test_of_its_effect() -> None:
    missing = set(FIELDS) - {flag for flag, _ in ROWS}
    assert not missing, "write a test that fails when the flag is ignored, and name it in flag_tests.tsv"


def test_every_named_test_exists_and_speaks_of_its_flag() -> None:
    problems = {row: problem for row in ROWS if (problem := problem_of(*row))}
    assert not problems


def test_a_row_with_a_wrong_name_is_a_problem() -> None:
    option, test = ROWS[0]
    assert problem_of("--no-such-flag", test) == "there is no such flag"
    assert problem_of(option, f"{test}_gone") == "there is no such test"
    assert problem_of(option, "contracts/test_flag_tests.py::test_no_row_is_there_twice") == (
        "the test does not speak of its flag"
    )


def test_no_row_is_there_twice() -> None:
    assert len(set(ROWS)) == len(ROWS)


def test_a_text_is_searched_for_whole_names() -> None:
    assert speaks_of("check('--save out')", "--save") and speaks_of("run(save=path)", "--save")
    assert not speaks_of("--save-hf out; autosave; save_hf=1", "--save")
