"""Blocks of the documentation: marked ones are run, as docs/STYLE.md says; command lines of all are parsed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.config.parse import CommandLine
from slime.config.parser import with_current_names

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(
    r"^<!-- (?P<what>file|runs)(?:: (?P<arg>[\w./-]+))? -->\n```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if path.stem != "STYLE" and MARKED.search(path.read_text())
}

DRIVER = re.compile(r"(?:python3?\s+(?:\S*/)?train(?:_async)?\.py|\bslime (?:train|train-async|plan))\s(.*)")
ARRAY = re.compile(r"^\w+=\(\n(.*?)^\)", re.M | re.S)  # flags that a later command line takes
WITH_FLAGS = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
    if "plugin" not in str(path.relative_to(ROOT))  # rows of a package: tests/integration/test_plugins.py
}


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words after `train.py` of each command line of a page, and those of lines that are flags alone."""
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S):
        lines = block.replace("\\\n", " ").splitlines() + [flags.replace("\n", " ") for flags in ARRAY.findall(block)]
        for line in lines:
            command = DRIVER.search(line)
            if not command and not line.lstrip().startswith("--"):
                continue
            words = shlex.split(command.group(1) if command else line, comments=True)
            ends = ("&", "&&", "|", "||", ";", ">", ">>", "2>")
            end = next((i for i, word in enumerate(words) if word in ends), None)
            yield [word for word in words[:end] if word not in ("...", "\\") and not word.startswith("${")]


def run_page(page: Path, folder: Path, *, slow: bool) -> int:
    """Write the files of a page and run its blocks in order; return how many were run."""
    for name in ("train.py", "train_async.py", "slime", "tools", "examples", "scripts", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{folder}:{ROOT}", "SLIME_PYTHON": sys.executable}
    count = 0
    for block in MARKED.finditer(page.read_text()):
        if block["what"] == "file":
            (folder / block["arg"]).write_text(block["code"])
        elif slow or block["arg"] != "slow":
            command = [sys.executable, "-c"] if block["kind"] == "python" else ["bash", "-euc"]
            done = subprocess.run(
                [*command, block["code"]], cwd=folder, env=environment, capture_output=True, text=True, timeout=170
            )
            expected = int((block["arg"] or "").removeprefix("status-") or 0) if block["arg"] != "slow" else 0
            assert done.returncode == expected, f"{block['code']}\n{done.stdout}{done.stderr}"
            count += 1
    return count


@pytest.mark.parametrize("name", PAGES)
def test_the_marked_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    assert run_page(PAGES[name], tmp_path, slow=False) >= 1


def test_the_learning_path_has_blocks_that_run() -> None:
    assert {"docs/start/own_reward.md", "docs/start/own_data.md"} <= PAGES.keys()


def test_a_block_that_fails_fails_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- runs -->\n```bash\nfalse\n```\n")
    with pytest.raises(AssertionError, match="false"):
        run_page(page, tmp_path, slow=False)


def problems_of(words: list[str], command_line: CommandLine) -> list[str]:
    tokens = with_current_names(words, say=False)
    return command_line.parser.parse_all(tokens, SimpleNamespace(), explain_unknown=lambda name: None)


def test_flags_and_values_in_the_command_lines_of_all_pages_parse() -> None:
    command_line, lines, wrong = CommandLine(), 0, []
    for name, path in WITH_FLAGS.items():
        for words in command_lines(path.read_text()):
            lines += 1
            wrong += [f"{name}: {problem}" for problem in problems_of(words, command_line)]
    assert wrong == [] and lines >= 60


def test_a_wrong_value_in_a_block_is_found() -> None:
    page = "```bash\npython train.py --lr fast \\\n    --advantage-estimator pqo ... > log\n```\n"
    (words,) = command_lines(page)
    problems = problems_of(words, CommandLine())
    assert [problem.split(":")[0] for problem in problems] == ["--lr", "--advantage-estimator"]


def hunks_of(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (file, its lines before, its lines after) of each hunk of a page's diffs that name a file."""
    for block in re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S):
        for diff in re.split(r"^--- a/", block, flags=re.M)[1:]:
            name, *rest = diff.splitlines(keepends=True)
            for hunk in "".join(rest).split("\n@@ ")[1:]:
                lines = hunk.splitlines(keepends=True)[1:]
                before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
                yield name.strip(), before, after


DIFFS = [hunk for path in sorted(ROOT.glob("docs/*.md")) for hunk in hunks_of(path.read_text())]


def test_the_diffs_of_worked_examples_apply_to_the_files_that_they_name() -> None:
    assert len(DIFFS) >= 3
    for file, before, _ in DIFFS:
        assert (ROOT / file).read_text().count(before) == 1, f"{file} has no longer\n{before}"
