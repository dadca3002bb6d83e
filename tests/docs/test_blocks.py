"""Blocks of the documentation that are marked as runnable are run, page by page, as docs/STYLE.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(
    r"^<!-- (?P<what>file|runs)(?:: (?P<arg>[\w./-]+))? -->\n```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if path.stem != "STYLE" and MARKED.search(path.read_text())
}


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
