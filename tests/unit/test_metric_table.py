"""Every metric that the product writes has a row, and the page of metrics shows the rows."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from slime.observability.metric_table import FAMILIES, describe
from tools.make_metric_reference import DEFAULT_OUTPUT, render

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((ROOT / "tests" / "fixtures" / "metrics").glob("*.jsonl"))
FAMILY = re.compile(r"(rollout|train|perf|eval|memory|passrate|multi_turn)/[\w@.<>/-]*[\w>]")
NOT_METRICS = {
    "memory/memory.limit_in_bytes",  # files of cgroups
    "memory/memory.oom_control",
    "perf/critic_",  # stands before a name
    "rollout/x",  # any column of the trainer, whose names are in slime.utils.train_data
}
COUNTED = "rollout/fully_async/crashed_groups"
PACKAGES = ("ray", "rollout", "training", "backends/megatron_utils", "observability", "algorithms")


def names_in_code() -> set[str]:
    """Texts of the code that look like a metric; what is filled in is "x"."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / "slime" / package).rglob("*.py"):
            if path.name == "metric_table.py":
                continue
            tree = ast.parse(path.read_text())
            parts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
            parts |= {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    texts = [str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values]
                    found.add("".join(texts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    found.add(node.value)
    return {text for text in found if FAMILY.fullmatch(text)} - NOT_METRICS


def test_every_name_in_the_code_has_a_row() -> None:
    names = names_in_code()
    assert {"rollout/raw_reward", "perf/update_weights_time", "rollout/fully_async/queue_size"} <= names
    assert sorted(name for name in names if describe(filled_in(name)) is None) == []


def filled_in(name: str) -> str:
    """One of the names that code makes of a text with a part to be filled in."""
    return {"memory/after_x/x": "memory/after_train/host_rss_gb", "rollout/fully_async/x": COUNTED}.get(name, name)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_metric_of_a_recorded_run_has_a_row(path: Path) -> None:
    names = {name for line in path.read_text().splitlines() for name in json.loads(line)}
    assert len(names) > 30
    assert sorted(name for name in names - {"step_key", "time", "alarm"} if describe(name) is None) == []


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert DEFAULT_OUTPUT.read_text() == render(), "stale: run python tools/make_metric_reference.py"


def test_rows_are_unique_and_name_where_they_are_made() -> None:
    rows = [row for family in FAMILIES.values() for row in family]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert (ROOT / row.source).exists(), row
        assert row.meaning and "|" not in row.meaning + row.unit + row.healthy, row


def test_a_name_is_described_by_the_row_that_fits_best() -> None:
    described = {
        name: row.name
        for name in ("eval/sums-pass@4", "eval/sums", "eval/sums/response_len/max")
        if (row := describe(name))
    }
    assert described == {
        "eval/sums-pass@4": "eval/<set>-pass@<k>",
        "eval/sums": "eval/<set>",
        "eval/sums/response_len/max": "eval/<set>/response_len/<stat>",
    }
    assert describe("rollout/response_len/deviation") is None
