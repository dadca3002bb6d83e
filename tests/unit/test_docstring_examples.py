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
    """What starts one is left out by name in scripts/test.sh."""
    script = (ROOT / "scripts" / "test.sh").read_text()
    folders = (ROOT / "tests" / "unit", ROOT / "tests" / "contracts", ROOT / "tests" / "training" / "algorithms")
    starts = re.compile(r"import own_ray|ray\.init\(|import make_engine")
    left = [path for folder in folders for path in folder.rglob("*.py") if starts.search(path.read_text())]
    assert [
        path for path in left if str(path.relative_to(ROOT)) not in script and path.name != Path(__file__).name
    ] == []
