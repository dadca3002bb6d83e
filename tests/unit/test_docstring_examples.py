"""Examples in docstrings are run: what they print is what they say."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for package in ("slime", "slime_plugins", "tools")
    for path in (ROOT / package).rglob("*.py")
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_an_example_prints_what_it_says(module: str) -> None:
    found = importlib.import_module(module)
    results = doctest.testmod(found, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples; see the captured output"


def test_the_fast_tests_start_no_ray() -> None:
    """What starts one is marked, for `scripts/test.sh --fast` to leave it out."""
    folders = (ROOT / "tests" / "unit", ROOT / "tests" / "contracts")
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    starts = re.compile(r"import own_ray|ray\.init\(|import make_engine")
    left = [path for path, text in texts.items() if starts.search(text) and path.name != Path(__file__).name]
    assert left and [path for path in left if "\npytestmark = pytest.mark.processes\n" not in texts[path]] == []
    assert "not gpu and not slow and not processes" in (ROOT / "scripts" / "test.sh").read_text()
