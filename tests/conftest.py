"""How the suite is spread over two workers (pytest -n 2): the tests that start runs all go to one.

Two runs at a time would starve each other of two cores; beside the one that runs, the other worker does the tests that
are alone in their process, or start one engine. In the order of the files the runs come first, and both workers end at
about the same time.

Property tests see the same examples in each run, without a time limit for each: what fails for one change fails for
all. `--hypothesis-profile explore` looks at others.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")
LAUNCHING = ("tests/chaos/", "tests/integration/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneRunAtATime(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            """What stays together on a worker: a file, whose fixtures are made once; everything that starts runs."""
            return "launches" if nodeid.startswith(LAUNCHING) else nodeid.partition("::")[0]

    return OneRunAtATime(config, log)
