"""Rows of the chaos matrix (`matrix`): two by default, all under `slow`.

SLIME_CHAOS_DIR=/somewhere python -m pytest -m slow tests/chaos/test_matrix.py      goes on where a call was cut
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.chaos.matrix import Outcome, Row, all_rows, judge, outcome_of, prepare, table

pytestmark = pytest.mark.timeout(900)
BY_DEFAULT = {
    Row("manager", "generate", "SIGKILL"): "recovered",
    Row("lone-engine", "generate", "SIGKILL"): "recovered",
}
"""Row -> its outcome. While rollouts are made and trained on, one of two engines, the router and a trainer die in
tests/integration/test_fault_tolerance.py. An engine that hangs in a sync: tests/unit/test_engine_upkeep.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("SLIME_CHAOS_DIR")
    path = Path(given) if given else tmp_path_factory.mktemp("chaos")
    prepare(path)
    return path


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in BY_DEFAULT else pytest.mark.slow) for row in all_rows()],
    ids=lambda row: row.name,
)
def test_a_wounded_run_goes_on_or_says_why_it_does_not(folder: Path, row: Row) -> None:
    found = outcome_of(row, folder)
    print(found)
    assert found.holds, found
    assert found.outcome == BY_DEFAULT.get(row, found.outcome), found


class Ended:
    """A driver that printed these lines, at these times, and trained at those."""

    def __init__(self, lines: list[tuple[float, str]], steps: list[float]) -> None:
        self.lines, self.steps = lines, steps


@pytest.mark.parametrize(
    ("lines", "status", "outcome", "holds"),
    [
        ([(101.0, "[..] ERROR rank 1 of 2 is lost"), (103.0, "error: rank 1 of 2 is lost")], 1, "stopped", True),
        ([(103.0, "error: something went wrong")], 1, "stopped", False),
        ([(103.0, "Traceback (most recent call last):")], 1, "stopped", False),
        ([(101.0, "[..] ERROR rank 1 of 2 is lost")], None, "hang", False),
    ],
)
def test_a_row_holds_only_where_the_reason_names_what_was_wounded(
    tmp_path: Path, lines: list[tuple[float, str]], status: int | None, outcome: str, holds: bool
) -> None:
    (tmp_path / "wound.json").write_text(json.dumps({"time": 100.0, "pids": [1]}))
    row = Row("trainer", "train", "SIGKILL")
    found = judge(row, tmp_path, Ended(lines, []), None, status)  # type: ignore[arg-type]
    assert (found.outcome, found.holds) == (outcome, holds)


def test_an_engine_may_end_a_run_only_while_it_starts(tmp_path: Path) -> None:
    (tmp_path / "wound.json").write_text(json.dumps({"time": 100.0, "pids": [1]}))
    ended = Ended([(103.0, "error: engine 0 at http://127.0.0.1:1 did not answer")], [])
    found = [
        judge(Row(part, phase, "SIGKILL"), tmp_path, ended, None, 1).holds  # type: ignore[arg-type]
        for part in ("engine", "scheduler")
        for phase in ("start", "sync")
    ]
    assert found == [True, False, True, False]


def test_a_run_that_was_not_wounded_shows_nothing(tmp_path: Path) -> None:
    row = Row("trainer", "train", "SIGKILL")
    found = judge(row, tmp_path, Ended([], []), None, 0)  # type: ignore[arg-type]
    assert (found.outcome, found.holds) == ("not wounded", False)


def test_the_table_shows_what_is_not_done_and_what_does_not_hold() -> None:
    bad = Outcome("router", "eval", "SIGSTOP", "hang", "", None, None, holds=False)
    lines = table({"router eval SIGSTOP": bad}).splitlines()
    assert "| router | eval | not done | **hang** () |" in lines and len(lines) == 2 + len(all_rows()) // 2
