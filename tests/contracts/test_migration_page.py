"""docs/migration.md and its table answer every parameter of verl with flags that exist; its worked example starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slime.config.parse import CommandLine
from tests.contracts.corpus import place

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migration.md").read_text()
VERL = Path(__file__).with_name("verl_parameters.txt").read_text().split()
SECTIONS = dict(re.findall(r"^## From (\w+).*?\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
SECTIONS["verl"] += (DOCS / "reference" / "verl_parameters.md").read_text()


def rows(section: str) -> list[tuple[str, str]]:
    """(theirs, ours) of each row of a section's tables."""
    cells = [line.strip("|").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [(theirs, ours) for theirs, ours in cells]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_parameter_of_verl_is_in_one_row():
    listed = [name for theirs, _ in rows("verl") for name in quoted(theirs)]
    assert sorted(listed) == sorted(VERL)


@pytest.mark.parametrize("section", ["upstream", "verl", "TRL", "OpenRLHF"])
def test_flags_that_the_page_advises_exist(section: str):
    known = {option for action in CommandLine().parser._actions for option in action.option_strings}
    ours = " ".join(ours for _, ours in rows(section)) + " ".join(
        re.findall(r"```bash\n(.*?)```", SECTIONS[section], re.DOTALL)
    )
    advised = set(re.findall(r"--[a-z0-9-]+", ours))
    assert advised - known == set()


def test_the_worked_example_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("async def score(args, sample):\n    return 1.0\n")
    [example] = re.findall(r"```bash\npython train.py (.*?)```", SECTIONS["verl"], flags=re.DOTALL)
    words = shlex.split(example.replace("\\\n", " "))
    files = {
        "train.parquet": "$ROOT/train.parquet",
        "test.parquet": "$ROOT/test.parquet",
        "Qwen3-0.6B": "$ROOT/Qwen3-0.6B",
    }
    line = place([files.get(word, word) for word in words], tmp_path)
    checked = CommandLine().check([*line, "--dry-run", "--accelerator", "cuda", "--plan-device", "h100-80gb"])
    assert checked.problems.all() == [] and checked.problems.no_effect == []
