"""How the suite is spread over two workers (pytest -n 2).

Whole runs all go to one worker: two at a time would starve each other of two cores. Tests of the engine that
tests/integration shares go to one worker, too, since each worker would start its own, and so do tests of the built
site. Every other file is by itself.
Runs come first in the order of the files, and a worker that has nothing left takes the next file.

Property tests see the same examples in each run, without a time limit for each: what fails for one change fails for
all. `--hypothesis-profile explore` looks at others.
"""

from __future__ import annotations

import gc
import os
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported. Tests multiply tiny matrices, on cores that another worker uses, too: a second thread makes
# that slower, and spins while it waits. Trainers and engines that a run starts have numbers of threads of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("explore", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")
LAUNCHING = ("tests/chaos/", "tests/integration/")
WITH_THE_SHARED_ENGINE = {
    f"test_{name}.py"
    for name in (
        *("disk_sync", "distributed_sync", "engine", "lost_bucket"),
        *("partial_rollout", "profile_rollout", "teacher_log_probs", "weight_check"),
    )
}
WITHOUT_A_RUN = {
    f"test_{name}.py"
    for name in (
        *("bad_http", "fp8_engine", "in_flight_sync", "int4_engine", "lora", "plugins", "teacher_server"),
        *("train_step_parity", "trainer", "trainer_memory", "trainer_profile"),
    )
}


def pytest_collection_finish() -> None:
    """Leave what hundreds of modules are made of out of every later look for garbage, here and in forked processes."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneRunAtATime(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            """Return what keeps this test on one worker with others: their file, or a group of files."""
            path = nodeid.partition("::")[0]
            name = PurePosixPath(path).name
            if path.startswith("tests/site/"):
                return "site"
            if not path.startswith(LAUNCHING) or name in WITHOUT_A_RUN:
                return path
            return "shared engine" if name in WITH_THE_SHARED_ENGINE else "runs"

    return OneRunAtATime(config, log)
