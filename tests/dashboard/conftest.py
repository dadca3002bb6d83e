"""A browser on the pages of runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.visitors import Visitor, chromium, require_browser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require_browser()
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[[Path], Visitor]]:
    """Opens the runs in a directory; nothing may go wrong in a tab."""
    with ExitStack() as visits:

        def begin(directory: Path) -> Visitor:
            command = [sys.executable, "-m", "slime.dashboard", str(directory)]
            server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            visits.callback(server.wait, 10)
            visits.callback(server.terminate)
            assert server.stdout is not None
            found = re.search(r"http\S+/\?token=\S+", server.stdout.readline())
            assert found is not None
            visitors.append(Visitor(browser, found[0]))
            visits.callback(visitors[-1].tab.close)
            return visitors[-1]

        visitors: list[Visitor] = []
        yield begin
    assert not [wrong for visitor in visitors for wrong in visitor.wrong]
